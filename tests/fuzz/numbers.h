/* Numbers at which code goes wrong, and where records have theirs. */
#ifndef FUZZ_NUMBERS_H
#define FUZZ_NUMBERS_H

#include <stdint.h>

static const uint64_t limits[] = {0, 1, 2, 3, 4, 31, 32, 33, 127, 128, 255, 256, 4096, 65535, 65536, 65532,
                                  0x7fffffff, 0x80000000, 0xffffffff, 0x7fffffffffffffff, 0x8000000000000000,
                                  0xfffffffffffff000, 0xffffffffffffff00, 0xffffffffffffffe0, 0xffffffffffffffff};

/* Where a record has numbers, and how many bytes. */
static const struct { uint8_t at, size; } fields[] = {{0, 1}, {1, 4}, {5, 8}, {13, 8}, {21, 4}, {33, 1}, {34, 8}, {42, 8},
                                                     {50, 1}, {51, 4}, {55, 8}, {63, 8}, {71, 8}};

#endif
