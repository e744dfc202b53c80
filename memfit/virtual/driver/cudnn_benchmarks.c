/* What cuDNN's benchmark mode may choose: every plan that it tries for a convolution is executed with the same
 * arguments. Nothing is timed here, so any of them could be the fastest on a card; the workspaces of the convolution
 * whose plans differ most are kept. */
#include <pthread.h>

#include "vgpu.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const void *arguments, *last; /* of the plan that was executed last, and that plan */
static size_t plans, least, most;    /* tried with these arguments, and their workspaces */
static size_t convolutions, widest_least, widest_most;

void benchmark_arguments_made(const void *descriptor) {
    pthread_mutex_lock(&lock);
    if (descriptor == arguments) arguments = NULL; /* a new one at the same address */
    pthread_mutex_unlock(&lock);
}

void benchmark_executed(const void *plan, const void *with, size_t workspace) {
    pthread_mutex_lock(&lock);
    if (with != arguments) {
        arguments = with;
        plans = 1;
        least = most = workspace;
    } else if (plan != last) {
        plans++;
        if (workspace < least) least = workspace;
        if (workspace > most) most = workspace;
        if (plans == 2) convolutions++;
        if (most - least >= widest_most - widest_least) {
            widest_least = least;
            widest_most = most;
        }
    }
    last = plan;
    pthread_mutex_unlock(&lock);
}

/* How many convolutions had several plans tried, and the least and most workspace of the one with the widest choice. */
API size_t memfit_vgpu_benchmarked(size_t *lower, size_t *upper) {
    pthread_mutex_lock(&lock);
    size_t count = convolutions;
    *lower = widest_least;
    *upper = widest_most;
    pthread_mutex_unlock(&lock);
    return count;
}
