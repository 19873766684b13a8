/* The four kernels of STREAM over static arrays, as in the original: copy, scale, add, triad. */
#include <stdio.h>
#include <string.h>

#ifndef COUNT
#define COUNT 2000000
#endif
static double a[COUNT], b[COUNT], c[COUNT];

static void report(const char *name, const double *array) {
    double sum = 0;
    unsigned long bits, mixed = 0;
    for (long i = 0; i < COUNT; i++) {
        sum += array[i];
        memcpy(&bits, &array[i], sizeof bits);
        mixed = mixed * 31 + bits;
    }
    printf("%s %.6e %016lx\n", name, sum, mixed);
}

int main(void) {
    for (long i = 0; i < COUNT; i++) { a[i] = 1 + i % 7; b[i] = 2; c[i] = 0; }
    for (int round = 0; round < 3; round++) {
        for (long i = 0; i < COUNT; i++) c[i] = a[i];
        for (long i = 0; i < COUNT; i++) b[i] = 3 * c[i];
        for (long i = 0; i < COUNT; i++) c[i] = a[i] + b[i];
        for (long i = 0; i < COUNT; i++) a[i] = (b[i] + 3 * c[i]) / 16;
    }
    report("a", a);
    report("b", b);
    report("c", c);
    return 0;
}
