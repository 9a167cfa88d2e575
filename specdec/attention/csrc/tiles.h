// Covering a number of rows by tiles whose height is known at compile time.
#pragma once

#include <type_traits>

namespace dh {

// Calls `f` with the number from 1 to N that `value` is, as a type.
template <int N, typename F>
inline void one_of(int value, const F& f) {
  if constexpr (N > 1) {
    if (value < N) return one_of<N - 1>(value, f);
  }
  f(std::integral_constant<int, N>{});
}

// Calls `f(std::integral_constant<int, n>, first)` for tiles of n <= N rows, of nearly equal height, that
// cover `count` rows.
template <int N, typename F>
inline void in_tiles(int count, const F& f) {
  const int tiles = (count + N - 1) / N;
  for (int tile = 0, first = 0; tile < tiles; ++tile) {
    const int rows = (count - first + tiles - tile - 1) / (tiles - tile);
    one_of<N>(rows, [&](auto n) { f(n, first); });
    first += rows;
  }
}

}  // namespace dh
