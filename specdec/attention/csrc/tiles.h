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

// Calls `f(rows, first)` for parts of at most `most` rows, of nearly equal height, that cover `count` rows.
template <typename F>
inline void in_even_parts(int most, int count, const F& f) {
  const int parts = (count + most - 1) / most;
  for (int part = 0, first = 0; part < parts; ++part) {
    const int rows = (count - first + parts - part - 1) / (parts - part);
    f(rows, first);
    first += rows;
  }
}

// Calls `f(std::integral_constant<int, n>, first)` for tiles of n <= N rows, of nearly equal height, that
// cover `count` rows.
template <int N, typename F>
inline void in_tiles(int count, const F& f) {
  in_even_parts(N, count, [&](int rows, int first) { one_of<N>(rows, [&](auto n) { f(n, first); }); });
}

}  // namespace dh
