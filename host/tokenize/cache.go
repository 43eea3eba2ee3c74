package tokenize

import (
	"hash/maphash"
	"strings"
	"sync"
)

const (
	cacheShards     = 16
	cacheShardWords = 2048 // 16 shards of so many words of up to 256 bytes: 8 MB of keys at the very most
	cacheWordBytes  = 256  // longer words seldom come twice
)

// wordCache remembers the tokens of words. It is bounded and safe for concurrent use.
type wordCache struct {
	seed   maphash.Seed
	shards [cacheShards]cacheShard
}

type cacheShard struct {
	mu    sync.RWMutex
	words map[string][]int32
}

func newWordCache() *wordCache { return &wordCache{seed: maphash.MakeSeed()} }

func (c *wordCache) shard(word string) *cacheShard {
	return &c.shards[maphash.String(c.seed, word)%cacheShards]
}

// get returns the word's tokens, which the caller must not change.
func (c *wordCache) get(word string) ([]int32, bool) {
	s := c.shard(word)
	s.mu.RLock()
	ids, ok := s.words[word]
	s.mu.RUnlock()
	return ids, ok
}

// put keeps copies. A full shard is emptied: common words are back at once, and nothing has to be kept in order.
func (c *wordCache) put(word string, ids []int32) {
	ids = append(make([]int32, 0, len(ids)), ids...)
	s := c.shard(word)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.words == nil || len(s.words) >= cacheShardWords {
		s.words = make(map[string][]int32)
	}
	s.words[strings.Clone(word)] = ids
}
