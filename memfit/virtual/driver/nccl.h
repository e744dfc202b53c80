/* What the two halves of the stand-in for NCCL share: communicators, and what is passed between their ranks. */
#ifndef MEMFIT_NCCL_H
#define MEMFIT_NCCL_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "rooms.h"

typedef struct {
    int ranks, rank, device;
    bool split; /* made of another one without its ranks meeting: `ranks` is only the most that it can be */
    Room *room; /* NULL where ranks cannot meet: then every other rank is taken to be a copy of this one */
    char name[48];
    unsigned splits;
    pthread_mutex_t lock; /* one thread at a time passes messages */
} Communicator;

enum {
    NCCL_SYSTEM_ERROR = 2,
    NCCL_INTERNAL_ERROR = 3,
    NCCL_INVALID_ARGUMENT = 4,
    NCCL_REMOTE_ERROR = 6,
};

/* What PyTorch's watchdog has not seen the end of yet: a collective was called on this thread; the event after it was
 * recorded; and waiting until all ends were seen. */
void watchdog_collective_called(void);
void watchdog_event_recorded(const void *event);
void watchdog_wait(void);

/* Gathers a few bytes of every rank, in order; a status of NCCL. */
int nccl_gather_bytes(Communicator *communicator, const void *own, void *all, size_t bytes);

#endif
