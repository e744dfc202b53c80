/* How much of each device the processes of one virtual machine hold. Devices are numbered as the machine has them. */
#ifndef MEMFIT_USAGE_H
#define MEMFIT_USAGE_H

#include <stdbool.h>
#include <stddef.h>

typedef struct {
    unsigned pid;
    size_t bytes;
} Holder;

/* Notes that this process now holds so many bytes of a device, its context included; false, and nothing is changed,
 * when the other processes leave no room for them. */
bool usage_hold(int device, size_t bytes);
/* What other processes that live hold of a device. */
size_t usage_others(int device);
/* The most that all processes together ever held of a device; 0 where a process is alone. */
size_t usage_peak(int device);
/* The other processes that hold any of a device: at most `room` of them are written, and their number is returned. */
size_t usage_holders(int device, Holder *out, size_t room);

#endif
