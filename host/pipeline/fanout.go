package pipeline

import "sync/atomic"

// fanOut is a Link to several places: each frame goes to all of them, and its owner gets its bytes back once, from the
// last that needs them no more.
type fanOut []Link

// linkTo joins links to one; nil for none.
func linkTo(links []Link) Link {
	switch len(links) {
	case 0:
		return nil
	case 1:
		return links[0]
	}
	return fanOut(links)
}

// Send is Link's.
func (l fanOut) Send(f Frame) {
	if f.Owner != nil {
		owner := &sharedOwner{owner: f.Owner}
		owner.left.Store(int32(len(l)))
		f.Owner = owner
	}
	for _, next := range l {
		next.Send(f)
	}
}

// sharedOwner gives bytes back that several hold.
type sharedOwner struct {
	owner Releaser
	left  atomic.Int32
}

// Release is Releaser's.
func (o *sharedOwner) Release() {
	if o.left.Add(-1) == 0 {
		o.owner.Release()
	}
}
