/* Where the ranks of a communicator pass small messages to each other. */
#ifndef MEMFIT_ROOMS_H
#define MEMFIT_ROOMS_H

#include <stdbool.h>
#include <stddef.h>

typedef struct Room Room;

/* Enters the room of a name and waits until all of its ranks are there, as NCCL does; NULL where ranks cannot meet,
 * because the process belongs to no virtual machine. */
Room *room_enter(const char *name, int ranks, int rank);
/* A room for ranks that all are in this process; each enters it once. */
Room *room_private(int ranks);
Room *room_share(Room *room, int rank);
void room_leave(Room *room);

/* One message between this rank and a peer. */
typedef struct {
    Room *room;
    int peer;
    bool sends;
    void *bytes; /* read or written */
    size_t size;
    int certainty; /* of its values, see vgpu.h; unknown ones are not passed on */
    bool done;
} Message;

/* Passes messages on, in order between any two ranks, until all are done; false when a peer has ended. */
bool rooms_pass(Message *messages, size_t count);

#endif
