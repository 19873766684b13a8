/* PageRank on a random graph whose degrees are skewed, in compressed rows; two threads. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#ifndef NODES
#define NODES 200000
#endif
enum { DEGREE = 12, ROUNDS = 6, THREADS = 2 };
static unsigned *starts, *edges, *degrees;
static double *ranks, *next;
static unsigned long state = 1;
static unsigned random_node(void) {
    state = state * 6364136223846793005ul + 1442695040888963407ul;
    unsigned long high = state >> 33;
    /* The square prefers low numbers. */
    return (unsigned)((high % NODES) * ((high >> 7) % NODES) / NODES);
}
static void *round_of(void *part) {
    long from = (long)part * NODES / THREADS, to = ((long)part + 1) * NODES / THREADS;
    for (long node = from; node < to; node++) {
        double sum = 0;
        for (unsigned e = starts[node]; e < starts[node + 1]; e++)
            sum += ranks[edges[e]] / degrees[edges[e]];
        next[node] = 0.15 / NODES + 0.85 * sum;
    }
    return 0;
}
int main(void) {
    starts = malloc((NODES + 1) * sizeof *starts);
    edges = malloc((size_t)NODES * DEGREE * sizeof *edges);
    degrees = calloc(NODES, sizeof *degrees);
    ranks = malloc(NODES * sizeof *ranks);
    next = malloc(NODES * sizeof *next);
    for (long i = 0; i <= NODES; i++) starts[i] = (unsigned)(i * DEGREE);
    for (long e = 0; e < (long)NODES * DEGREE; e++) degrees[edges[e] = random_node()]++;
    for (long i = 0; i < NODES; i++) {
        ranks[i] = 1.0 / NODES;
        if (!degrees[i]) degrees[i] = 1;
    }
    for (int round = 0; round < ROUNDS; round++) {
        pthread_t threads[THREADS];
        for (long t = 0; t < THREADS; t++) pthread_create(&threads[t], 0, round_of, (void *)t);
        for (long t = 0; t < THREADS; t++) pthread_join(threads[t], 0);
        double *swap = ranks;
        ranks = next;
        next = swap;
    }
    double sum = 0, best = 0;
    for (long i = 0; i < NODES; i++) { sum += ranks[i]; if (ranks[i] > best) best = ranks[i]; }
    printf("%.17g %.17g\n", sum, best);
    return 0;
}
