/* A program that is linked with a shared libtcmalloc and mixes its functions with malloc and free.
 * It calls the operators `new` and `delete` by their mangled C++ names. Their memory is tcmalloc's
 * own, below the program break. */

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern void *tc_malloc(size_t);
extern void *tc_calloc(size_t, size_t);
extern void *tc_realloc(void *, size_t);
extern void *tc_memalign(size_t, size_t);
extern int tc_posix_memalign(void **, size_t, size_t);
extern size_t tc_malloc_size(void *);
extern void tc_free(void *);
extern void tc_free_sized(void *, size_t);
extern size_t MallocExtension_GetAllocatedSize(const void *);
extern int MallocExtension_VerifyAllMemory(void);

extern void *_Znwm(size_t);                     /* operator new(size) */
extern void *_ZnwmSt11align_val_t(size_t, size_t); /* operator new(size, alignment) */
extern void _ZdlPv(void *);                     /* operator delete(block) */
extern void _ZdlPvmSt11align_val_t(void *, size_t, size_t);

#include "check.h"

#define BLOCKS 64
#define BLOCK (1 << 20)
#define SMALL 50000

static unsigned char *blocks[BLOCKS];

static unsigned char *allocate(int at) {
    void *aligned;
    switch (at % 8) {
    case 0: return malloc(BLOCK);
    case 1: return tc_malloc(BLOCK);
    case 2: return tc_calloc(BLOCK / 4, 4);
    case 3: return tc_memalign(8192, BLOCK);
    case 4: return tc_posix_memalign(&aligned, 8192, BLOCK) == 0 ? aligned : NULL;
    case 5: return tc_realloc(malloc(100), BLOCK);
    case 6: return _Znwm(BLOCK);
    default: return _ZnwmSt11align_val_t(BLOCK, 8192);
    }
}

static void release(int at, void *block) {
    switch (at % 8) {
    case 0: tc_free(block); break;
    case 1: free(block); break;
    case 2: tc_free_sized(block, BLOCK); break;
    case 3: free(realloc(block, 100)); break;
    case 4: tc_free(tc_realloc(block, 2 * BLOCK)); break;
    case 5: free(block); break;
    case 6: _ZdlPv(block); break;
    default: _ZdlPvmSt11align_val_t(block, BLOCK, 8192); break;
    }
}

static void *thread(void *argument) {
    (void)argument;
    for (int at = 0; at < 1000; at++) _ZdlPv(_Znwm(at * 100));
    return strdup("result");
}

int main(void) {
    for (int at = 0; at < BLOCKS; at++) {
        CHECK((blocks[at] = allocate(at)));
        if (at % 8 == 3 || at % 8 == 4 || at % 8 == 7) CHECK((uintptr_t)blocks[at] % 8192 == 0);
        fill_block(blocks[at], BLOCK, at);
    }
    static unsigned char *small[SMALL];
    for (int at = 0; at < SMALL; at++) {
        small[at] = _Znwm(16 + at % 300);
        memset(small[at], at, 16 + at % 300);
    }
    for (int at = 0; at < BLOCKS; at++) {
        CHECK(at % 8 >= 6 || tc_malloc_size(blocks[at]) >= BLOCK);
        CHECK(at % 8 >= 6 || MallocExtension_GetAllocatedSize(blocks[at]) >= BLOCK);
        check_block(blocks[at], BLOCK, at);
        release(at, blocks[at]);
    }
    for (int at = 0; at < SMALL; at++) {
        for (int byte = 0; byte < 16 + at % 300; byte++)
            CHECK(small[at][byte] == (unsigned char)at);
        _ZdlPv(small[at]);
    }
    CHECK(MallocExtension_VerifyAllMemory());
    for (int round = 0; round < 4; round++) {
        pthread_t other;
        void *result;
        CHECK(pthread_create(&other, NULL, thread, NULL) == 0);
        CHECK(pthread_join(other, &result) == 0);
        tc_free(result);
    }
    puts("done");
    return 0;
}
