package batch

import (
	"cmp"
	"slices"
	"time"

	"github.com/mlxcel/mlxcel/host/schedule"
	"github.com/mlxcel/mlxcel/sdk"
)

// load is what the active jobs want.
type load struct {
	streams    int    // jobs past their prompt, in a step or not
	decode     []*job // of these, those ready for a step, the least recently served first
	prefill    []*job // ready jobs with a prompt to go, by priority, then those whose turn it is
	groups     int    // steps under way that decode
	prefilling bool   // a step under way has prompt rows
	soon       bool   // a step under way will make a stream
}

func (c *core) survey() load {
	var l load
	for _, j := range c.active {
		switch {
		case j.ended:
		case j.streaming():
			l.streams++
			if j.place == placeReady && !c.holds(j) {
				l.decode = append(l.decode, j)
			}
		case j.place == placeReady && !c.holds(j):
			l.prefill = append(l.prefill, j)
		}
	}
	slices.SortStableFunc(l.decode, func(a, b *job) int { return cmp.Compare(a.turn, b.turn) })
	slices.SortStableFunc(l.prefill, func(a, b *job) int {
		return cmp.Or(cmp.Compare(b.req.Priority, a.req.Priority), cmp.Compare(a.turn, b.turn))
	})
	for _, f := range c.flights {
		if f.decodes > 0 {
			l.groups++
		}
		l.prefilling = l.prefilling || f.prefill > 0
		l.soon = l.soon || slices.ContainsFunc(f.pieces, func(p piece) bool { return p.want == sdk.WantToken })
	}
	return l
}

// shape is what the next step may be.
type shape struct {
	pieces  int // sequences at most
	decodes int // of them that decode, at most
	rows    int // prompt rows at most
}

// shapeOf applies the rules of groups in flight and of pace.
func (c *core) shapeOf(l load) shape {
	s := shape{pieces: c.cfg.maxBatch}
	if c.cfg.microBatch > 0 {
		s.pieces = min(s.pieces, c.cfg.microBatch)
	}
	if l.streams == 0 {
		switch {
		case len(c.flights) >= schedule.PiecesInFlight(c.cfg.stages):
		case l.soon: // it would stand behind a long piece
			s.rows = min(c.spread(l), c.prefillRows(0))
		default:
			s.rows = c.spread(l)
		}
		return s
	}
	groups := c.groups(l.streams)
	if l.groups < groups {
		s.decodes = min(c.groupSize(l.streams, groups), s.pieces, len(l.decode))
	}
	// Prompts ride with the groups, in equal shares so that no group holds up the others, or go in the place of one. Small
	// shares fill the stages evenly: the head's work is for the rows that decode, so that large ones leave its stage waiting.
	if len(l.prefill) > 0 && (s.decodes > 0 || !l.prefilling && len(c.flights) < groups) {
		if s.decodes == s.pieces && c.cfg.microBatch == 0 {
			s.decodes = c.makeRoom(l, s.pieces)
		}
		s.rows = max(1, c.prefillRows(s.decodes)/min(groups, c.cfg.stages))
	}
	// A whole piece that has no room beside the streams takes turns with them.
	if c.whole && s.rows > 0 && s.decodes > 0 && c.wholePiece(l.prefill[0]) > c.room(s.decodes) {
		if l.decode[0].turn < l.prefill[0].turn {
			s.rows = 0
		} else {
			s.decodes = 0
		}
	}
	return s
}

// groups is how many steps with streams may be under way: what all that is active fills, where a size is given.
func (c *core) groups(streams int) int {
	if c.cfg.microBatch > 0 {
		return (len(c.active) + c.cfg.microBatch - 1) / c.cfg.microBatch
	}
	return c.rounds.groups(streams)
}

// groupSize shares the streams out evenly. A given micro-batch size is filled.
func (c *core) groupSize(streams, groups int) int {
	if c.cfg.microBatch > 0 {
		return c.cfg.microBatch
	}
	return (streams + groups - 1) / groups
}

// fullGroup is the streams of a step once all that is active has got past its prompt.
func (c *core) fullGroup() int {
	all := len(c.active)
	return min(c.groupSize(all, c.groups(all)), c.cfg.maxBatch)
}

// makeRoom leaves a place for a prompt in a step that streams would fill. Where a step has only one, they take turns.
func (c *core) makeRoom(l load, pieces int) int {
	if pieces == 1 && l.decode[0].turn < l.prefill[0].turn {
		return 1
	}
	return pieces - 1
}

// spread cuts the waiting prompts into pieces that follow each other through the stages, one prompt's as well as several's.
func (c *core) spread(l load) int {
	if c.cfg.stages == 1 || c.whole {
		return c.chunk
	}
	waiting := 0 // rows, with those that have gone: pieces stay as large to the end
	for _, j := range l.prefill {
		waiting += len(j.history)
	}
	pieces := c.cfg.stages
	if fixed, row := c.pace.step(1), c.pace.row.median(); fixed > 0 && row > 0 {
		pieces = schedule.PromptPieces(waiting, c.cfg.stages, float64(fixed)/float64(row))
	}
	return min(c.chunk, max(leastChunk, (waiting+pieces-1)/pieces))
}

// leastChunk is the prompt rows that go with a round over the groups even where streams are held up by them: a prompt must
// get on.
const leastChunk = 4

// leastTurn is the prompt rows after which others go before a prompt. A short one is done by then: it must not wait for the
// whole line with a few rows to go.
const leastTurn = 64

// unmeasuredChunk is the prompt rows beside running streams before anything has been measured.
const unmeasuredChunk = 32

// prefillRows is the prompt rows that may ride along with so many decodes.
func (c *core) prefillRows(decodes int) int {
	rows := c.cfg.decodeChunk
	if rows == 0 {
		rows = c.pace.rows(decodes, c.fullGroup(), c.cfg.maxStall)
	}
	return min(rows, c.room(decodes))
}

// room is the prompt rows that a step has room for beside so many others: together they make one micro-batch, unless
// micro-batches have a given size.
func (c *core) room(others int) int {
	if c.cfg.microBatch > 0 {
		return c.chunk
	}
	return min(c.chunk, max(1, max(c.chunk, c.cfg.maxBatch)-others))
}

// compose starts one more step where there is work for one.
func (c *core) compose(now time.Time) bool {
	l := c.survey()
	s := c.shapeOf(l)
	f := &flight{began: now, streams: l.streams, groups: c.groups(l.streams)}
	for _, j := range l.decode {
		if len(f.pieces) == s.decodes {
			break
		}
		if j.place == placeReady && c.grow(now, j) {
			c.board(f, j, 1)
			c.toTheBack(j)
		}
	}
	turn := max(s.rows, min(leastTurn, c.chunk))
	for _, j := range l.prefill {
		if s.rows == 0 || len(f.pieces) == s.pieces {
			break
		}
		share, room := c.promptShare(j, s.rows), c.room(f.decodes+f.prefill)
		if c.whole && share > room {
			break
		}
		n := c.board(f, j, min(share, room))
		s.rows = max(0, s.rows-n)
		if j.lap += n; j.lap >= turn {
			c.toTheBack(j)
		}
	}
	if len(f.pieces) == 0 {
		return false
	}
	c.depart(f)
	return true
}

// promptShare is the rows that a prompt takes of those that may go. A step of its own for a small rest costs more than a
// step that is a little longer.
func (c *core) promptShare(j *job, rows int) int {
	if c.whole {
		return c.wholePiece(j)
	}
	if rest := len(j.history) - j.fed; rest <= rows+rows/4 {
		return rest
	}
	return rows
}

// wholePiece is the rows up to the next multiple of the chunk, or the prompt's end: where results depend on how a prompt is
// cut, neither what was measured nor what else runs may decide that.
func (c *core) wholePiece(j *job) int { return min(len(j.history)-j.fed, c.chunk-j.fed%c.chunk) }

// board gives a job its share of a step, of so many rows at most, and returns how many it took.
func (c *core) board(f *flight, j *job, rows int) int {
	decoding := j.decoding()
	step := j.next(min(rows, c.cut(j)-j.fed))
	step.Snapshot = j.snapshots > 0 && j.missed() && step.End() == c.keep(j)
	rows = step.Rows
	if decoding {
		f.decodes++
	} else {
		f.prefill += rows
	}
	p := piece{job: j, rows: rows, want: step.Want}
	if p.exclusive() {
		j.place = placeFlight
	}
	j.fed += rows
	j.steps++
	f.pieces = append(f.pieces, p)
	f.steps = append(f.steps, step)
	return rows
}

// toTheBack lets all others go before j. A prompt that got no more than what another had left over of a step keeps its
// place.
func (c *core) toTheBack(j *job) {
	c.turn++
	j.turn, j.lap = c.turn, 0
}

func (c *core) depart(f *flight) {
	c.lastFlight++
	f.id = c.lastFlight
	for _, o := range c.flights {
		o.mixed = o.mixed || f.prefill > 0
		f.mixed = f.mixed || o.prefill > 0
		o.company, f.company = true, true
	}
	f.expected = c.pace.expected(f)
	c.flights = append(c.flights, f)
	c.out.steps = append(c.out.steps, f)
}

// next is the job's next rows. Rows of one role go together, so that a prefill after a preemption repeats what was
// prompt as prompt, and what was generated as generated.
func (j *job) next(rows int) sdk.SeqStep {
	s := sdk.SeqStep{Seq: j.seq, Pos: j.fed}
	end, prompt := min(j.fed+rows, len(j.history)), len(j.req.Prompt)
	if j.fed < prompt {
		s.Prompt = true
		end = min(end, prompt)
		if j.req.WantScores && len(j.scores) < prompt-1 {
			end = min(end, prompt-1) // the last row yields the first token
			s.Want, s.Targets = sdk.WantScores, j.history[j.fed+1:end+1]
		}
	}
	s.Rows, s.Tokens = end-j.fed, j.history[j.fed:end]
	if end == len(j.history) {
		s.Want, s.TopN, s.Logprob = sdk.WantToken, j.req.TopN, j.req.Logprob
	}
	return s
}
