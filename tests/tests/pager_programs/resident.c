// Fills 32 MiB, checks them, and prints whether most of them are outside of this process: "paged"
// or "resident". With an argument, prints it first.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int count, char **arguments) {
    enum { LEN = 32 << 20 };
    if (count > 1) printf("%s ", arguments[1]);
    unsigned char *volatile heap = malloc(LEN);
    for (int i = 0; i < LEN; i++) heap[i] = (i >> 12) + i;
    for (int i = 0; i < LEN; i++)
        if (heap[i] != (unsigned char)((i >> 12) + i)) return 1;
    char line[200];
    long resident = 0;
    FILE *status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status))
        if (!strncmp(line, "RssAnon:", 8)) resident = atol(line + 8);
    puts(resident < 24 << 10 ? "paged" : "resident");
    return 0;
}
