/* A child that outlives its parent, like a daemon. */
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 8192 };

int main(void) {
    unsigned char *memory = mmap(0, PAGES * PAGE, PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(memory, 1, PAGES * PAGE);
    int alive[2];
    char byte;
    if (pipe(alive)) return 1;
    if (fork()) {
        close(alive[0]);
        if (write(1, "parent ends\n", 12) != 12) return 1;
        return 0;
    }
    /* Waits until the parent has ended. */
    close(alive[1]);
    if (read(alive[0], &byte, 1) != 0) return 1;
    for (int i = 0; i < PAGES; i++)
        if (memory[i * PAGE] != 1) {
            if (write(1, "zeros!\n", 7) != 7) return 1;
            return 2;
        }
    if (write(1, "read all\n", 9) != 9) return 1;
    return 0;
}
