// How work is shared out, and the threads of one attention call.
#pragma once

#include <atomic>
#include <cstdint>

#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <sched.h>

namespace dh {

// Share `index` of `size` equal shares.
struct Share {
  int index;
  int size;

  // The part [first, last) of `count` pieces, contiguous.
  void of(int64_t count, int64_t* first, int64_t* last) const {
    *first = count * index / size;
    *last = count * (index + 1) / size;
  }
};

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Spins until `done()`: what is waited for takes microseconds. After a while it yields in between, so that
// more threads than cores are slow instead of stuck.
template <typename F>
void spin_until(const F& done) {
  for (int spins = 0; !done(); ++spins) {
    if (spins > 1000)
      sched_yield();
    else
      relax();
  }
}

// Runs `first(share)`, then, when all have done that, `second(share)`, on `num_threads` threads.
template <typename First, typename Second>
void run_in_two_phases(int num_threads, const First& first, const Second& second) {
#if defined(_OPENMP)
  if (num_threads > 1) {
    std::atomic<int> arrived{0};
#pragma omp parallel num_threads(num_threads)
    {
      const Share share = {omp_get_thread_num(), omp_get_num_threads()};
      first(share);
      arrived.fetch_add(1, std::memory_order_acq_rel);
      spin_until([&] { return arrived.load(std::memory_order_acquire) == share.size; });
      second(share);
    }
    return;
  }
#endif
  first(Share{0, 1});
  second(Share{0, 1});
}

}  // namespace dh
