// The matrix unit of Intel processors (AMX): tiles of sixteen rows of 64 bytes. A product of bf16 adds, for sixteen
// rows and sixteen columns, over thirty-two numbers of the inner dimension to sums in fp32. What becomes of a row does
// not depend on how many rows there are in a tile, nor on what they hold.
#pragma once

#include <cstdint>

// Numbers are packed in pairs as the vectors of bf16 have them, so a machine that hides these has no tiles either.
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__AVX512BF16__) && defined(__linux__)
#define DH_AMX 1

#include <sys/syscall.h>
#include <unistd.h>

namespace dh {

constexpr int kTileRows = 16;
constexpr int kTileUnits = 16;  // of 32 bits, in a row

// Whether the system lets this process have tiles: it is asked once.
inline bool has_amx() {
  constexpr long kAskForState = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool is_allowed = syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
  return is_allowed;
}

// Shapes of the eight tiles; those without rows cannot be used.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t num_rows[16] = {};

  void set(int tile, int rows, int units = kTileUnits) {
    row_bytes[tile] = rows > 0 ? uint16_t(4 * units) : 0;
    num_rows[tile] = uint8_t(rows);
  }
};

// Of all tiles, for this thread; what they held is lost.
inline void shape_tiles(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }
// No thread keeps tiles that it does not use: they would be saved whenever it is interrupted.
inline void release_tiles() { asm volatile("tilerelease"); }

template <int Tile>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(Tile));
}

template <int Tile>
inline void load_tile(const void* rows, int64_t row_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(rows), "r"(row_bytes), "i"(Tile) : "memory");
}

template <int Tile>
inline void store_tile(void* rows, int64_t row_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(rows), "r"(row_bytes), "i"(Tile) : "memory");
}

// sums[row][column] += pairs of bf16 of the row, times those of the column: `columns` has a row for each pair.
template <int Sums, int Rows, int Columns>
inline void add_tile_products() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sums), "i"(Rows), "i"(Columns));
}

}  // namespace dh

#endif
