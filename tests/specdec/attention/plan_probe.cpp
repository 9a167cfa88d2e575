// Tells tests/specdec/attention/test_cpu_plan.py, which mirrors the struct, how the CPU attention shares out its work.

#include <algorithm>

#include "../../../specdec/model/csrc/layout.h"
#include "paged_attention.h"

namespace {

struct PlannedItem {
  int32_t sequence, kv_head, first_row, num_rows, first_key, last_key;
  int64_t cost;
};

int planned(const dh::Step& step, const dh::Layer& layer, int num_shares, PlannedItem* items, int room) {
  dh::AttentionPlan plan;
  plan.build(step, layer, num_shares);
  const int count = int(plan.items.size());
  for (int i = 0; i < std::min(room, count); ++i) {
    const dh::WorkItem& item = plan.items[i];
    items[i] = {item.block.sequence, item.block.kv_head, item.block.first, item.block.count,
                item.first_key, item.last_key, item.cost};
  }
  return count;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int most_rows_of_a_block() { return dh::kRowBlock; }

// Both return how many items there are, and write as many of them as there is room for.
int planned_of_step(const dh::Step* step, const dh::Layer* layer, int num_shares, PlannedItem* items, int room) {
  return planned(*step, *layer, num_shares, items, room);
}

int planned_of_slices(const dh::Slice* slices, int64_t count, const dh::Layer* layer, int num_shares,
                      PlannedItem* items, int room) {
  dh::Layout layout;
  layout.build({slices, slices + count}, layer->block_size);
  return planned(layout.step(), *layer, num_shares, items, room);
}
}
#pragma GCC visibility pop
