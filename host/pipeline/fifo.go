package pipeline

import "slices"

// fifo is a queue that keeps its memory.
type fifo[T any] struct {
	items []T
	head  int
}

func (q *fifo[T]) len() int { return len(q.items) - q.head }

func (q *fifo[T]) push(v T) {
	if q.head > 0 && len(q.items) == cap(q.items) { // move down before growing
		n := copy(q.items, q.items[q.head:])
		clear(q.items[n:])
		q.items, q.head = q.items[:n], 0
	}
	q.items = append(q.items, v)
}

// front returns the oldest item; the queue must not be empty.
func (q *fifo[T]) front() *T { return &q.items[q.head] }

func (q *fifo[T]) pop() {
	var zero T
	q.items[q.head] = zero
	if q.head++; q.head == len(q.items) {
		q.items, q.head = q.items[:0], 0
	}
}

// all returns the items, the oldest first, until the queue changes.
func (q *fifo[T]) all() []T { return q.items[q.head:] }

// remove takes out item i.
func (q *fifo[T]) remove(i int) T {
	v := q.items[q.head+i]
	q.items = slices.Delete(q.items, q.head+i, q.head+i+1)
	if q.len() == 0 {
		q.items, q.head = q.items[:0], 0
	}
	return v
}
