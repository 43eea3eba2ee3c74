package batch

import (
	"slices"
	"time"

	"github.com/mlxcel/mlxcel/host/kvledger"
	"github.com/mlxcel/mlxcel/sdk"
)

// choices are the answers to one prompt. One of them, the source, prefills it; the others begin with the positions that it
// then holds, and each runs the prompt's last row itself, with its own sampler. Whatever goes wrong with that costs time, not
// an answer: who finds no source prefills the prompt itself.
type choices struct {
	jobs  []*job
	apart bool // a stage refused: each prefills the prompt itself
}

// unshared is a job that prefills a prompt itself, though another was to.
type unshared struct {
	job *job
	err error // of the stage that refused; nil where the source is gone
}

// newChoices makes jobs that can share know of each other. Scores alone are had before there is anything to share.
func newChoices(jobs []*job) {
	req := jobs[0].req
	if len(jobs) == 1 || len(req.Prompt) == 1 || req.MaxTokens == 0 {
		return
	}
	g := &choices{jobs: jobs}
	for _, j := range jobs {
		j.choices = g
	}
}

// keep is the positions that choices share. Where answers depend on how a prompt is cut, the others go on where it is cut
// without them.
func (c *core) keep(j *job) int {
	keep := len(j.req.Prompt) - 1
	if c.whole {
		keep -= keep % c.chunk
	}
	return keep
}

// source returns whom a job may begin with; nil where there is nobody.
func (c *core) source(j *job) *job {
	return c.best(j, placeJoining, placeReady, placeFlight)
}

// best is the fittest of the other choices that are at one of places.
func (c *core) best(j *job, places ...place) *job {
	g := j.choices
	if g == nil || g.apart || c.keep(j) == 0 {
		return nil
	}
	var best *job
	for _, o := range g.jobs {
		if o != j && !o.ended && slices.Contains(places, o.place) && (best == nil || c.fitness(o) > c.fitness(best)) {
			best = o
		}
	}
	return best
}

// fitness orders sources. Every cache can be shared where it ends, and with a snapshot; the older others are, the fewer can.
func (c *core) fitness(j *job) int {
	switch keep := c.keep(j); {
	case j.held == keep:
		return 3
	case j.held < keep: // it will be there
		return 2
	case j.snapshots > 0:
		return 1
	}
	return 0
}

// admit puts a job on the books, with what it will share: with whom it will begin with, from, or where that is nil with those
// that will begin with it.
func (c *core) admit(j, from *job) error {
	s := kvledger.Sequence{Seq: c.newSeq(), Length: len(j.history), MaxLen: j.length()}
	with := from
	if from == nil {
		with = c.best(j, placeWaiting)
		if j.missed() {
			s.Snapshots = 1 // for those that join late
		}
	}
	if with != nil {
		s.From, s.Keep = with.seq, c.keep(j)
	}
	err := c.ledger.Admit(s)
	if err != nil && s.Snapshots > 0 {
		s.Snapshots = 0
		err = c.ledger.Admit(s)
	}
	if err == nil {
		j.seq, j.snapshots = s.Seq, s.Snapshots
	}
	return err
}

// share has those that wait for a prompt begin, where their source has come so far, or is gone.
func (c *core) share() {
	for _, j := range c.active {
		if j.place != placeWaiting {
			continue
		}
		s := c.source(j)
		switch {
		case s == nil:
			c.out.unshared = append(c.out.unshared, unshared{job: j})
			c.counters.Unshared++
			c.reserve(j)
		case s.place == placeReady && s.steps == 0 && s.held >= c.keep(j):
			c.lend(s, j)
		}
	}
}

// lend has j begin with positions of s, which is in no step until that is done: no stage does one before the other.
func (c *core) lend(s, j *job) {
	keep := c.keep(j)
	s.lending++
	j.from, j.fed, j.held = s, keep, keep
	if j.req.WantScores && j.scores == nil {
		j.scores = slices.Clip(s.scores[:keep])
	}
	c.reserve(j)
}

func (c *core) reserve(j *job) {
	j.place = placeJoining
	c.out.reserve = append(c.out.reserve, j)
}

// lent ends what lend began.
func (c *core) lent(now time.Time, j *job) {
	s := j.from
	j.from = nil
	if s.lending--; s.ended && s.lending == 0 {
		c.leave(now, s)
	}
}

// canDoAlone tells whether a job that could not begin with another's positions can without them.
func canDoAlone(err error) bool {
	code := sdk.CodeOf(err)
	return code == sdk.CodeUnsupported || code == sdk.CodeUnknownSequence
}

// part has a job prefill its prompt itself, and the others of its choices that are still to come: what one is refused,
// others are.
func (c *core) part(j *job, err error) {
	if !j.choices.apart {
		j.choices.apart = true
		c.out.unshared = append(c.out.unshared, unshared{j, err})
	}
	for _, o := range j.choices.jobs {
		if o == j || o.place == placeWaiting {
			c.counters.Unshared++
			c.drop(o) // on the books it is with what it would have shared
			c.enqueue(o)
		}
	}
}

// cut is the end of a job's next rows where it must not go beyond: others want its state as it is there.
func (c *core) cut(j *job) int {
	if keep := c.keep(j); j.fed < keep && (j.awaited() || j.snapshots > 0 && j.missed()) {
		return keep
	}
	return len(j.history)
}

// holds tells whether a job has no step for now: others begin with its positions, or will as soon as it has them.
func (c *core) holds(j *job) bool {
	keep := c.keep(j)
	return j.lending > 0 || j.fed == keep && j.held < keep && j.awaited()
}

// awaited tells whether another waits for the prompt.
func (j *job) awaited() bool { return j.others(func(o *job) bool { return o.place == placeWaiting }) }

// missed tells whether another will want the prompt.
func (j *job) missed() bool { return j.others(func(o *job) bool { return !o.ended }) }

func (j *job) others(f func(o *job) bool) bool {
	return j.choices != nil && !j.choices.apart && slices.ContainsFunc(j.choices.jobs, func(o *job) bool { return o != j && f(o) })
}
