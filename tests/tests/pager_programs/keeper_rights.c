/* A program of root has a child, and changes its user. The process that holds the child's pages is
 * in the memory of the program: it must not keep rights that the program has dropped. */
#include <dirent.h>
#include <grp.h>
#include <linux/capability.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

enum { PAGE = 4096, PAGES = 6000, NOBODY = 65534 };

/* Reads the fields of the keeper's status; 0 if there is no keeper. A keeper that is ending has no
 * memory any more. */
static int read_keeper(char *uid, char *gid, char *groups, char *capabilities) {
    DIR *all = opendir("/proc");
    CHECK(all);
    int found = 0;
    for (struct dirent *entry; (entry = readdir(all));) {
        char path[300], line[4096], name[64] = "";
        char u[256] = "", g[256] = "", s[256] = "", c[256] = "";
        int parent = 0, has_memory = 0;
        snprintf(path, sizeof path, "/proc/%s/status", entry->d_name);
        FILE *status = atoi(entry->d_name) > 0 ? fopen(path, "r") : NULL;
        if (!status) continue;
        while (fgets(line, sizeof line, status)) {
            sscanf(line, "Name: %63s", name);
            sscanf(line, "PPid: %d", &parent);
            if (!strncmp(line, "Uid:", 4)) snprintf(u, sizeof u, "%s", line + 5);
            if (!strncmp(line, "Gid:", 4)) snprintf(g, sizeof g, "%s", line + 5);
            if (!strncmp(line, "Groups:", 7)) snprintf(s, sizeof s, "%s", line + 8);
            if (!strncmp(line, "CapPrm:", 7)) snprintf(c, sizeof c, "%s", line + 8);
            has_memory |= !strncmp(line, "VmSize:", 7);
        }
        fclose(status);
        if (strcmp(name, "granary-keeper") || parent != getpid() || !has_memory) continue;
        found++;
        strcpy(uid, u), strcpy(gid, g), strcpy(groups, s), strcpy(capabilities, c);
    }
    closedir(all);
    return found;
}

/* Waits until there is one keeper with these ids and capabilities. */
static void expect(const char *uid, const char *gid, unsigned long long capabilities) {
    char u[256] = "", g[256] = "", s[256] = "", c[256] = "";
    for (int attempt = 0; attempt < 500; attempt++) {
        if (read_keeper(u, g, s, c) == 1 && !strncmp(u, uid, strlen(uid))
            && !strncmp(g, gid, strlen(gid)) && strtoull(c, NULL, 16) == capabilities)
            return;
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    fprintf(stderr, "the keeper has Uid %sGid %sGroups %sCapPrm %s", u, g, s, c);
    _exit(1);
}

static void set_capabilities(unsigned capabilities) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {{capabilities, capabilities, 0}, {0, 0, 0}};
    CHECK(syscall(SYS_capset, &header, data) == 0);
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    int by_number = !strcmp(arguments[1], "number"), is_paged = getenv("GRANARY_LOCAL") != NULL;
    unsigned char *memory = malloc(PAGES * PAGE);
    CHECK(memory);
    fill_block(memory, PAGES * PAGE, 1);
    int go[2];
    CHECK(pipe(go) == 0);
    pid_t child = fork();
    if (child == 0) {
        char byte;
        CHECK(close(go[1]) == 0 && read(go[0], &byte, 1) == 0);
        check_block(memory, PAGES * PAGE, 1);
        _exit(9);
    }
    CHECK(child > 0);
    char u[256], g[256], s[256], c[256];
    if (is_paged) CHECK(read_keeper(u, g, s, c) == 1 && !strncmp(u, "0\t0\t0\t0", 7));
    CHECK(prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0) == 0);
    CHECK(by_number ? syscall(SYS_setgroups, 0, NULL) == 0 : setgroups(0, NULL) == 0);
    CHECK(by_number ? syscall(SYS_setresgid, NOBODY, NOBODY, NOBODY) == 0
                    : setresgid(NOBODY, NOBODY, NOBODY) == 0);
    CHECK(by_number ? syscall(SYS_setresuid, NOBODY, NOBODY, NOBODY) == 0
                    : setresuid(NOBODY, NOBODY, NOBODY) == 0);
    const char *nobody = "65534\t65534\t65534\t65534";
    set_capabilities(1 << CAP_CHOWN);
    if (is_paged) expect(nobody, nobody, 1 << CAP_CHOWN);
    set_capabilities(0);
    if (is_paged) expect(nobody, nobody, 0);
    CHECK(close(go[1]) == 0);
    check_child(child, 9);
    check_block(memory, PAGES * PAGE, 1);
    puts("done");
    return 0;
}
