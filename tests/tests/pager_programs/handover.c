/* One thread allocates blocks and fills them, another one checks and frees them: never more than
 * two at a time. */
#include <semaphore.h>
#include <pthread.h>
#include <stdlib.h>

#include "check.h"
enum { BLOCKS = 300, BYTES = 1 << 20 };
static unsigned char *blocks[2];
static sem_t filled, empty;

static void *consume(void *none) {
    for (int i = 0; i < BLOCKS; i++) {
        CHECK(!sem_wait(&filled));
        unsigned char *block = blocks[i % 2];
        for (int at = 0; at < BYTES; at += 4096) CHECK(block[at] == (unsigned char)(i + at / 4096));
        free(block);
        CHECK(!sem_post(&empty));
    }
    return none;
}

int main(void) {
    pthread_t consumer;
    CHECK(!sem_init(&filled, 0, 0) && !sem_init(&empty, 0, 2));
    CHECK(!pthread_create(&consumer, NULL, consume, NULL));
    for (int i = 0; i < BLOCKS; i++) {
        CHECK(!sem_wait(&empty));
        unsigned char *block = blocks[i % 2] = i % 3 == 0 ? malloc(BYTES)
            : i % 3 == 1 ? calloc(1, BYTES)
            : realloc(NULL, BYTES);
        CHECK(block);
        for (int at = 0; at < BYTES; at += 4096) block[at] = (unsigned char)(i + at / 4096);
        CHECK(!sem_post(&filled));
    }
    CHECK(!pthread_join(consumer, NULL));
    puts("handed over");
    return 0;
}
