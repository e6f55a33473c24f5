/* The words that tell the time, for streams.c: a table with open addressing from each word to its line. */
#ifndef WORDS_H
#define WORDS_H
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WORD_BYTES = 40 };

static struct { char word[WORD_BYTES]; int tick; } *table;
static size_t table_size;
static int64_t ticks;

static size_t place_of(const char *word, size_t length)
{
    uint64_t hash = 1469598103934665603u;
    for (size_t i = 0; i < length; i++)
        hash = (hash ^ (unsigned char)word[i]) * 1099511628211u;
    size_t at = hash % table_size;
    while (table[at].word[0] && (strncmp(table[at].word, word, length) || table[at].word[length]))
        at = (at + 1) % table_size;
    return at;
}

/* Returns whether the file could be read. */
static int read_words(const char *path)
{
    FILE *file = fopen(path, "r");
    char line[WORD_BYTES + 2];
    if (!file)
        return 0;
    while (fgets(line, sizeof line, file))
        ticks++;
    table_size = (size_t)ticks * 4 + 1;
    table = calloc(table_size, sizeof *table);
    rewind(file);
    for (int tick = 0; fgets(line, sizeof line, file); tick++) {
        size_t length = strcspn(line, "\n"), at = place_of(line, length);
        memcpy(table[at].word, line, length);
        table[at].tick = tick;
    }
    fclose(file);
    return 1;
}

#endif
