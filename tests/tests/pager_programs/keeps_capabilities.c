/* A daemon keeps one capability over setresuid, and uses it for setgroups, like chronyd and ntpd.
 * Then it drops the capability. All threads of the process must have the same capabilities then. */
#define _GNU_SOURCE
#include <dirent.h>
#include <grp.h>
#include <linux/capability.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "check.h"

enum { NOBODY = 65534 };

static void keep(unsigned capabilities) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {{capabilities, capabilities, 0}, {0, 0, 0}};
    CHECK(syscall(SYS_capset, &header, data) == 0);
}

static void check_threads(unsigned long long expected) {
    DIR *threads = opendir("/proc/self/task");
    CHECK(threads);
    int seen = 0;
    for (struct dirent *thread; (thread = readdir(threads));) {
        if (thread->d_name[0] == '.') continue;
        char path[300], line[300];
        snprintf(path, sizeof path, "/proc/self/task/%s/status", thread->d_name);
        FILE *status = fopen(path, "r");
        CHECK(status);
        while (fgets(line, sizeof line, status))
            if (!strncmp(line, "CapPrm:", 7)) {
                CHECK(strtoull(line + 7, NULL, 16) == expected);
                seen++;
            }
        fclose(status);
    }
    closedir(threads);
    CHECK(seen > 0);
}

int main(void) {
    CHECK(prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0) == 0);
    CHECK(setresuid(NOBODY, NOBODY, NOBODY) == 0);
    keep(1 << CAP_SETGID);
    CHECK(prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) == 0);
    check_threads(1 << CAP_SETGID);
    CHECK(setgroups(0, NULL) == 0);
    keep(0);
    check_threads(0);
    puts("done");
    return 0;
}
