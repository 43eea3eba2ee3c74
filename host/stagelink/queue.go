package stagelink

import (
	"fmt"
	"sync"
)

// FullError is a peer that does not take what is sent to it.
type FullError struct {
	Queued int
}

func (e *FullError) Error() string {
	return fmt.Sprintf("%d messages wait to be sent: the other side does not take them", e.Queued)
}

// queue holds what waits for the goroutine that writes a connection.
type queue[T any] struct {
	mu     sync.Mutex
	filled sync.Cond
	items  []T
	limit  int
	closed bool
}

func newQueue[T any](limit int) *queue[T] {
	q := &queue[T]{limit: limit}
	q.filled.L = &q.mu
	return q
}

// push adds an item: errClosed after close, a *FullError past the limit.
func (q *queue[T]) push(v T) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case q.closed:
		return errClosed
	case len(q.items) >= q.limit:
		return &FullError{Queued: len(q.items)}
	}
	q.items = append(q.items, v)
	q.filled.Signal()
	return nil
}

// drain waits for items and returns all of them; more is false once the queue is closed. empty is a slice that an
// earlier drain returned, whose memory the queue takes.
func (q *queue[T]) drain(empty []T) (items []T, more bool) {
	clear(empty)
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.items) == 0 && !q.closed {
		q.filled.Wait()
	}
	items, q.items = q.items, empty[:0]
	return items, !q.closed
}

func (q *queue[T]) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.filled.Signal()
}
