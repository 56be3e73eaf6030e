/* What the files of the stand-in share: a CUDA device that is not there (see ../__init__.py). */
#ifndef STAND_IN_DEVICE_H
#define STAND_IN_DEVICE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORTED __attribute__((visibility("default")))
#define MOST_DEVICES 16
#define MOST_STREAMS 512

/* counts.c: what tests read, each a number since the process began */
enum count {
    LAUNCHES, /* of kernels, products of matrices included */
    PRODUCTS, /* of matrices, by cuBLAS */
    COPIES,
    FILLS,
    SYNCS, /* the host waits until a stream or the device is idle */
    EVENT_SYNCS, /* the host waits for an event */
    QUERIES,
    STREAMS,
    EVENTS,
    RECORDS,
    WAITS, /* of one stream for another */
    ALLOCATIONS,
    COLLECTIVES,
    SENDS,
    RECEPTIONS,
    COMMUNICATORS,
    SPLITS, /* of one, in which all its ranks take part */
    COUNTS,
};
void count(enum count what);
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
void give_up(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));
enum setting_name { DEVICES, CAPABILITY, GIBIBYTES, PATIENCE, CONNECTIONS, HAZARDS };
double setting(enum setting_name name);

/* memory.c: ranges of a device's and of pinned memory */
enum place { PAGEABLE, PINNED, ON_DEVICE };
enum place place_of(const void *pointer, int *device, void **base, size_t *size);
bool take_memory(void **pointer, size_t size, enum place place, int device);
bool drop_memory(void *pointer);
void register_memory(void *pointer, size_t size);
void zero_memory(void *begin, size_t size);
size_t memory_in_use(int device);
size_t memory_of_device(void);

/* streams.c: streams in order, and what each waits for */
struct stream;
struct operation;
struct event {
    struct stream *stream; /* NULL: never recorded */
    uint64_t place; /* it has happened once so many operations of the stream have ended */
    double seconds;
    uint64_t clock[MOST_STREAMS]; /* hazards.c */
};
/* What a stream runs that needs other ranks. `start` and `advance` are called with the lock held: may it start, has it
 * ended? */
struct shared_work {
    bool (*may_start)(struct shared_work *);
    void (*start)(struct shared_work *);
    bool (*advance)(struct shared_work *); /* true once it has ended; then it is freed */
    void (*describe)(struct shared_work *, char *text, size_t size);
};
extern pthread_mutex_t lock;
int current_device(void);
void choose_device(int device);
struct stream *stream_of(void *handle);
struct stream *make_stream(void);
void enqueue_kernel(struct stream *stream);
void enqueue_copy(struct stream *stream, void *to, const void *from, size_t size);
void enqueue_fill(struct stream *stream, void *to, int value, size_t size);
void enqueue_call(struct stream *stream, void (*function)(void *), void *argument);
void enqueue_shared(struct stream *stream, struct shared_work *work);
void record_event(struct event *event, struct stream *stream);
void await_event(struct stream *stream, const struct event *event);
bool has_happened(const struct event *event);
bool host_sees(const struct event *event); /* whether it has happened, which the host knows then */
void host_waits_for_event(const struct event *event);
void host_waits_for_stream(struct stream *stream);
void host_waits_for_device(void);

/* hazards.c: what has surely ended before what; all with the lock held */
void clock_to_event(uint64_t *event, int stream, uint64_t place);
void clock_from_event(int stream, const uint64_t *event);
void host_knows(const uint64_t *event);
void note_access(int stream, uint64_t place, const void *begin, size_t size, bool writes, const char *what);
void note_copy(int stream, uint64_t place, const void *to, const void *from, size_t size);
void note_taking(int stream, void *begin, size_t size);
void note_shared_access(struct stream *stream, const void *begin, size_t size, bool writes, const char *what);
void stream_takes(struct stream *stream, void *begin, size_t size);

/* job.c: what the ranks of a job share */
uint32_t *doorbell(void); /* rung whenever a rank may find that it can go on */
void ring(void);
void wait_for_ring(uint32_t seen, double seconds);
void *shared_file(const char *name, size_t size);

#endif
