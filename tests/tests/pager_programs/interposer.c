/* A program and, with -DINTERPOSER, a library that is preloaded together with Granary's. The
 * library counts calls and forwards them to the next definition. */

#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#ifdef INTERPOSER

int opened, changed;

int open(const char *path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    int mode = va_arg(arguments, int);
    va_end(arguments);
    int (*next)(const char *, int, ...) = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open");
    opened++;
    return next(path, flags, mode);
}

int fcntl(int fd, int command, ...) {
    va_list arguments;
    va_start(arguments, command);
    long argument = va_arg(arguments, long);
    va_end(arguments);
    int (*next)(int, int, ...) = (int (*)(int, int, ...))dlsym(RTLD_NEXT, "fcntl");
    changed++;
    return next(fd, command, argument);
}

#else

int main(void) {
    int *opened = dlsym(RTLD_DEFAULT, "opened"), *changed = dlsym(RTLD_DEFAULT, "changed");
    int before = opened ? *opened : 0;
    int fd = open("/dev/null", O_RDWR);
    int flags = fcntl(fd, F_GETFL, 0);
    if (fd < 0 || flags < 0 || (flags & O_ACCMODE) != O_RDWR) return 1;
    if (!opened || *opened != before + 1 || !changed || *changed < 1) return 2;
    puts("done");
    return 0;
}

#endif
