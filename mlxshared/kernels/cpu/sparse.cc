// Attention over the positions that an indexer picks (mk_sparse_attention): score, pick, gather, attend. The gathered
// positions are a cache of their own, in ascending order, so a row's sums hang on what it picked and on nothing else.
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "ops.h"
#include "team.h"

namespace mk {
namespace {

// A row that sees more positions than it may attend to.
struct SparseRow {
  const KvView *keys, *kv;
  int64_t row, positions;
  float *scores; // [positions, in whole blocks]
  std::vector<Block> blocks;
  std::vector<Block *> pointers;
  KvView gathered;
  mk_segment segment;
};

struct SparseCall {
  const Ops *ops;
  IndexJob index;
  AttentionJob attention;
  int64_t top_k;
  int64_t blocks; // most that a row of the batch sees
  std::vector<SparseRow> rows;
  std::vector<AttentionUnit> units;
};

void score_task(void *context, int64_t begin, int64_t end, Worker &w) {
  auto &c = *static_cast<const SparseCall *>(context);
  for (int64_t u = begin; u < end; u++) {
    const SparseRow &r = c.rows[size_t(u / c.blocks)];
    const int64_t block = u % c.blocks;
    if (block * MK_KV_BLOCK < r.positions)
      c.ops->index_scores(c.index, r.row, *r.keys, block, r.scores + block * MK_KV_BLOCK, w);
  }
}

// The least score that is picked, and how many positions of exactly that score are not.
struct Threshold {
  float score;
  int64_t skip;
};

Threshold threshold(float *scores, int64_t n, int64_t top_k, float *copy) {
  for (int64_t i = 0; i < n; i++) {
    if (scores[i] != scores[i])
      scores[i] = __builtin_inff();
    copy[i] = scores[i];
  }
  std::nth_element(copy, copy + (n - top_k), copy + n);
  const float least = copy[n - top_k];
  int64_t above = 0, equal = 0;
  for (int64_t i = 0; i < n; i++) {
    above += scores[i] > least;
    equal += scores[i] == least;
  }
  return {least, equal - (top_k - above)};
}

// Copies the picked positions, ascending, into the row's gathered blocks.
void gather(const SparseRow &r, Threshold t) {
  const size_t row_bytes = r.gathered.key_bytes / MK_KV_BLOCK;
  int64_t at = 0;
  for (int64_t p = 0; p < r.positions; p++) {
    if (r.scores[p] < t.score || (r.scores[p] == t.score && t.skip-- > 0))
      continue;
    const unsigned char *from = r.kv->blocks[p / MK_KV_BLOCK]->data + size_t(p % MK_KV_BLOCK) * row_bytes;
    std::copy_n(from, row_bytes, r.blocks[size_t(at / MK_KV_BLOCK)].data + size_t(at % MK_KV_BLOCK) * row_bytes);
    at++;
  }
}

void pick_task(void *context, int64_t begin, int64_t end, Worker &w) {
  auto &c = *static_cast<const SparseCall *>(context);
  for (int64_t i = begin; i < end; i++) {
    const SparseRow &r = c.rows[size_t(i)];
    gather(r, threshold(r.scores, r.positions, c.top_k, scratch(w, kScratchState, r.positions)));
  }
}

void attend_task(void *context, int64_t begin, int64_t end, Worker &w) {
  auto &c = *static_cast<const SparseCall *>(context);
  for (int64_t i = begin; i < end; i++)
    c.ops->attention_unit(c.attention, c.units[size_t(i)], w);
}

int64_t blocks_of(int64_t positions) { return (positions + MK_KV_BLOCK - 1) / MK_KV_BLOCK; }

// Gives the batch's rows their memory and cuts their attention into units.
void lay_out(mk_pool *p, SparseCall &c) {
  Worker &w = p->team.workers[0];
  const int64_t picked = blocks_of(c.top_k);
  int64_t floats = 0;
  c.blocks = 0;
  for (const SparseRow &r : c.rows) {
    floats += blocks_of(r.positions) * MK_KV_BLOCK;
    c.blocks = std::max(c.blocks, blocks_of(r.positions));
  }
  const size_t block_bytes = c.rows[0].kv->key_bytes;
  auto *memory = static_cast<unsigned char *>(scratch_bytes(w, kScratchValues, block_bytes * size_t(picked) * c.rows.size()));
  float *scores = scratch(w, kScratchWeights, floats);
  c.units.clear();
  for (SparseRow &r : c.rows) {
    r.scores = scores;
    scores += blocks_of(r.positions) * MK_KV_BLOCK;
    r.blocks.clear();
    for (int64_t i = 0; i < picked; i++, memory += block_bytes)
      r.blocks.push_back({1, memory});
    // The kernel reads whole blocks; what lies past the picked positions gets no weight, but must be numbers.
    std::fill_n(r.blocks.back().data, block_bytes, static_cast<unsigned char>(0));
    r.pointers.clear();
    for (Block &b : r.blocks)
      r.pointers.push_back(&b);
    r.gathered = *r.kv;
    r.gathered.first = 0;
    r.gathered.blocks = r.pointers.data();
    r.segment = {nullptr, r.row, 1, c.top_k - 1};
    for (int64_t h = 0; h < c.attention.heads; h += kUnitQueries)
      c.units.push_back({&r.segment, &r.gathered, 0, 1, 0, int(h), int(std::min(kUnitQueries, c.attention.heads - h)), 0,
                         (c.top_k - 1) / kSpan, nullptr});
  }
}

void run_batch(mk_pool *p, SparseCall &c) {
  if (c.rows.empty())
    return;
  lay_out(p, c);
  const int64_t rows = int64_t(c.rows.size()), units = int64_t(c.units.size());
  const KvView &kv = *c.rows[0].kv;
  const int64_t score_steps = int64_t(c.index.heads) * c.index.dim * MK_KV_BLOCK / 16;
  run(p->team, rows * c.blocks, grain(p, rows * c.blocks, score_steps), score_task, &c);
  run(p->team, rows, 1, pick_task, &c);
  const int64_t attend_steps = c.top_k * std::min<int64_t>(kUnitQueries, c.attention.heads) * (kv.k_pad + kv.v_pad) / 8;
  run(p->team, units, grain(p, units, attend_steps), attend_task, &c);
  c.rows.clear();
}

// The segments' rows that see no more positions than they may attend to.
std::vector<mk_segment> dense_rows(const mk_segment *segs, int64_t nsegs, int64_t top_k) {
  std::vector<mk_segment> dense;
  for (int64_t i = 0; i < nsegs; i++) {
    mk_segment s = segs[i];
    s.n = std::min(s.n, top_k - s.pos);
    if (s.n > 0)
      dense.push_back(s);
  }
  return dense;
}

// The other rows.
void attend_sparsely(mk_pool *p, const void *q, mk_dtype t, int heads, float scale, const mk_segment *segs, int64_t nsegs,
                     const mk_indexer *indexer, void *y) {
  SparseCall c = {p->ops,
                  {static_cast<const unsigned char *>(indexer->q), t, indexer->weights, indexer->heads, indexer->dim},
                  {static_cast<const unsigned char *>(q), t, heads, scale, 0, 0, nullptr, static_cast<unsigned char *>(y)},
                  indexer->top_k,
                  0,
                  {},
                  {}};
  constexpr size_t kMost = size_t(64) << 20; // bytes of gathered positions at once
  for (int64_t i = 0; i < nsegs; i++) {
    const KvView &kv = view_of(segs[i].kv);
    const size_t row_bytes = kv.key_bytes * size_t(blocks_of(c.top_k));
    for (int64_t n = std::max<int64_t>(0, c.top_k - segs[i].pos); n < segs[i].n; n++) {
      if ((c.rows.size() + 1) * row_bytes > kMost || (!c.rows.empty() && c.rows[0].kv->key_bytes != kv.key_bytes))
        run_batch(p, c);
      c.rows.push_back({&view_of(indexer->keys[i]), &kv, segs[i].row0 + n, segs[i].pos + n + 1, nullptr, {}, {}, {}, {}});
    }
  }
  run_batch(p, c);
}

} // namespace
} // namespace mk

using namespace mk;

extern "C" mk_result mk_sparse_attention(mk_pool *p, const void *q, mk_dtype t, int heads, float scale, const mk_segment *segs,
                                         int64_t nsegs, const mk_indexer *indexer, void *y) {
  mk_result missing = 0;
  const mk_result own = reported([&] {
    const std::vector<mk_segment> dense = dense_rows(segs, nsegs, indexer->top_k);
    missing = mk_attention(p, q, t, heads, scale, 0, 0, nullptr, dense.data(), int64_t(dense.size()), y);
    if (!missing)
      attend_sparsely(p, q, t, heads, scale, segs, nsegs, indexer, y);
  });
  return own ? own : missing;
}
