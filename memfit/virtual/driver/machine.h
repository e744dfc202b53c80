/* What the processes of one virtual machine share: files in the folder that MEMFIT_VGPU_MACHINE names.
 *
 * memfit makes the folder for a program that it runs, and removes it afterwards. Without one, a process has its
 * devices to itself and no rank but its own. A process holds a lock on its byte of a file for as long as it lives:
 * the kernel lets go of it however the process ends. */
#ifndef MEMFIT_MACHINE_H
#define MEMFIT_MACHINE_H

#include <stdbool.h>
#include <stddef.h>

/* Whether there is such a folder. */
bool machine_shared(void);
/* Maps a file of the folder, made when it is not there; NULL when that fails. The file stays open: closing any of its
 * descriptors would drop the process's locks on it. */
void *machine_map(const char *name, size_t bytes, int *file);
/* Makes sure that there is room on the disk for a part of a file, which would otherwise be a fatal signal. */
bool machine_room(int file, size_t offset, size_t bytes);
/* Takes the lock on a byte; false when another process has it. Waits for it when asked to. */
bool machine_lock(int file, size_t byte, bool wait);
void machine_unlock(int file, size_t byte);
/* Whether another process has the lock on a byte. */
bool machine_locked(int file, size_t byte);

#endif
