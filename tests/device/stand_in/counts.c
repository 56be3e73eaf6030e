/* Counts, settings from the environment, and words. */
#include "device.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static uint64_t counts[COUNTS];

void count(enum count what)
{
    __atomic_add_fetch(&counts[what], 1, __ATOMIC_RELAXED);
}

EXPORTED void stand_in_counts(uint64_t *into)
{
    memcpy(into, counts, sizeof counts);
}

static void say_in(const char *format, va_list arguments)
{
    char line[4096];
    const char *rank = getenv("RANK");
    int length = snprintf(line, sizeof line, "stand-in of CUDA, rank %s: ", rank ? rank : "0");
    length += vsnprintf(line + length, sizeof line - length - 1, format, arguments);
    if (length > (int)sizeof line - 2)
        length = sizeof line - 2;
    line[length++] = '\n';
    if (write(2, line, length) < 0)
        return;
}

void say(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    say_in(format, arguments);
    va_end(arguments);
}

void give_up(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    say_in(format, arguments);
    va_end(arguments);
    abort();
}

double setting(const char *name, double otherwise)
{
    const char *value = getenv(name);
    return value && *value ? atof(value) : otherwise;
}

int device_count(void)
{
    return (int)setting("STAND_IN_DEVICES", 1);
}

int capability(void)
{
    return (int)setting("STAND_IN_CAPABILITY", 80);
}
