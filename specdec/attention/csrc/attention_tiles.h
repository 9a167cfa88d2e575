// What attention multiplies, by the matrix unit: scores of sixteen keys with sixteen query rows at a time, and sums of
// values, of two tokens each, over thirty-two tokens at a time.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include "amx.h"
#include "simd.h"

#ifdef DH_AMX
namespace dh {

constexpr int kTileTokens = 32;    // of a product of weights and values
constexpr int kTilesOfValues = 4;  // of sixteen columns each, whose sums are kept at a time
constexpr int kTileNumbers = kTileRows * kTileUnits;

// All eight tiles, whole.
inline void shape_for_attention() {
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) shapes.set(tile, kTileRows);
  shape_tiles(shapes);
}

// Sixteen rows, the last ones missing, as columns: columns[unit][row]; `num_units` is a multiple of sixteen.
inline void rows_to_columns(const uint32_t* rows, int64_t row_units, int num_rows, int num_units, uint32_t* columns) {
  for (int unit = 0; unit < num_units; unit += kTileUnits) {
    u32v square[kTileRows];
    for (int r = 0; r < kTileRows; ++r)
      square[r] = r < num_rows ? load_as<u32v>(rows + r * row_units + unit) : u32v{};
    transpose(square);
    for (int i = 0; i < kTileUnits; ++i) store_as(columns + (unit + i) * kTileRows, square[i]);
  }
}

// Scores of up to four tiles of sixteen keys with sixteen queries, which are columns: scores[key][query].
template <int N>
inline void score_tiles(const char* const* keys, int64_t key_bytes, const uint32_t* queries, int num_units,
                        float* scores) {
  constexpr int kKeys = 4, kQueries = 6;
  [&]<int... i>(std::integer_sequence<int, i...>) {
    (zero_tile<i>(), ...);
    for (int unit = 0; unit < num_units; unit += kTileUnits) {
      load_tile<kQueries>(queries + unit * kTileRows, kTileRows * sizeof(uint32_t));
      ((load_tile<kKeys + i % 2>(keys[i] + unit * sizeof(uint32_t), key_bytes),
        add_tile_products<i, kKeys + i % 2, kQueries>()),
       ...);
    }
    (store_tile<i>(scores + i * kTileNumbers, kTileRows * sizeof(float)), ...);
  }(std::make_integer_sequence<int, N>{});
}

// Takes sixteen scores of each query out of scores[key][query], times `scaling`: a row for each of the first `num_rows`
// queries, four at a time.
inline void scores_to_rows(const float* scores, int num_rows, float scaling, float* rows, int64_t row_stride) {
  for (int r = 0; r < num_rows; r += 4) {
    u32v four[4], pairs[4];
    for (int i = 0; i < 4; ++i) {
      const float* at = scores + i * kTileRows + r;
      __m512i keys = _mm512_castsi128_si512(load_as<__m128i>(at));
      keys = _mm512_inserti32x4(keys, load_as<__m128i>(at + 4 * kTileRows), 1);
      keys = _mm512_inserti32x4(keys, load_as<__m128i>(at + 8 * kTileRows), 2);
      four[i] = (u32v)_mm512_inserti32x4(keys, load_as<__m128i>(at + 12 * kTileRows), 3);
    }
    for (int i = 0; i < 4; i += 2) {
      pairs[i] = interleave<1, false>(four[i], four[i + 1]);
      pairs[i + 1] = interleave<1, true>(four[i], four[i + 1]);
    }
    for (int i = 0; i < 4 && r + i < num_rows; ++i) {
      const u32v row = i % 2 == 0 ? interleave<2, false>(pairs[i / 2], pairs[i / 2 + 2])
                                  : interleave<2, true>(pairs[i / 2], pairs[i / 2 + 2]);
      storev(rows + (r + i) * row_stride, (f32v)row * scaling);
    }
  }
}

// Lays out values [tokens, head_dim] of two tokens as row `pair` of tiles of sixteen columns each, one tile behind the
// other. Of thirty-two columns the first tile has, of every eight, the first four, the second tile the others.
inline void pair_values(const bf16* first, const bf16* second, int head_dim, int pair, uint32_t* tiles) {
  for (int d = 0; d < head_dim; d += 2 * kTileUnits, tiles += 2 * kTileNumbers) {
    __m512i one = {}, two = {};
    if (d + 2 * kTileUnits <= head_dim) {
      one = load_as<__m512i>(first + d);
      two = load_as<__m512i>(second + d);
    } else {
      std::memcpy(&one, first + d, (head_dim - d) * sizeof(bf16));
      std::memcpy(&two, second + d, (head_dim - d) * sizeof(bf16));
    }
    store_as(tiles + pair * kTileUnits, _mm512_unpacklo_epi16(one, two));
    store_as(tiles + kTileNumbers + pair * kTileUnits, _mm512_unpackhi_epi16(one, two));
  }
}

// Sums over `num_steps` times thirty-two tokens of sixteen rows' weights, which lie `weight_bytes` apart, times N tiles
// of paired values; `step_numbers` are between the tiles of one step and those of the next. sums[row][N * 16].
template <int N>
inline void value_tiles(const void* weights, int64_t weight_bytes, const uint32_t* tiles, int64_t step_numbers,
                        int num_steps, float* sums) {
  constexpr int kWeights = 4, kValues = 5;
  [&]<int... c>(std::integer_sequence<int, c...>) {
    (zero_tile<c>(), ...);
    for (int step = 0; step < num_steps; ++step, tiles += step_numbers) {
      load_tile<kWeights>(static_cast<const char*>(weights) + step * kTileTokens * sizeof(bf16), weight_bytes);
      ((load_tile<kValues + c % 2>(tiles + c * kTileNumbers, kTileUnits * sizeof(uint32_t)),
        add_tile_products<c, kWeights, kValues + c % 2>()),
       ...);
    }
    (store_tile<c>(sums + c * kTileUnits, N * kTileUnits * sizeof(float)), ...);
  }(std::make_integer_sequence<int, N>{});
}

// Puts columns of two neighbouring tiles of sums back in order: the first sixteen, or (High) the others.
template <bool High>
inline f32v in_order(const float* sums) {
  constexpr int kOther = kLanes;
  const auto place = [](int i) { return (High ? 8 : 0) + i / 8 * 4 + i % 4 + (i % 8 / 4) * kOther; };
  return [&]<int... i>(std::integer_sequence<int, i...>) {
    return (f32v)pick(load_as<u32v>(sums), load_as<u32v>(sums + kTileUnits),
                      std::integer_sequence<int, place(i)...>{});
  }(std::make_integer_sequence<int, kLanes>{});
}

}  // namespace dh
#endif
