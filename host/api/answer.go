package api

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"time"

	"github.com/mlxcel/mlxcel/host/batch"
)

// job is one request, ready to be answered.
type job struct {
	generation
	model   *Model
	param   string  // the field that holds the prompts, for errors
	prompts []input // each is answered n times
	scores  bool    // the prompt's log-probabilities are wanted
	format  format
}

// input is one prompt.
type input struct {
	ids  []int32
	echo string // text that goes before each answer
}

// format is how an endpoint writes answers.
type format interface {
	// open begins the stream of a choice; nil where nothing goes first.
	open(c *choice) any
	// delta is a piece of a stream; nil where it would be empty.
	delta(c *choice, p piece) any
	// end closes the stream of a choice.
	end(c *choice) any
	// chunk puts a choice into an event of the stream; without one, the event is for the usage alone.
	chunk(choice any, u *usage) any
	// whole is a choice in one piece.
	whole(c *choice) any
	// response puts all choices together.
	response(choices []any, u usage) any
}

// usage counts tokens. Prompts count once, however many answers they get.
type usage struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
	Total      int `json:"total_tokens"`
}

// choice is one of a request's answers.
type choice struct {
	input
	index int
	transcript
	stream  Stream
	text    string
	tokens  []scoredToken // only where log-probabilities are asked for
	scores  []float32     // of the prompt's tokens but the first; known with the first event
	reason  batch.FinishReason
	timings batch.Timings
	latest  time.Time // of the last token
}

// event is news of a choice.
type event struct {
	*choice
	piece
	done bool
	err  error
}

// answer runs a job and writes what comes of it.
func (s *Server) answer(w http.ResponseWriter, r *http.Request, j *job) *Error {
	ctx, cancel := context.WithCancel(r.Context())
	record := recordOf(r.Context())
	record.begin(j)
	choices, err := s.submit(ctx, j)
	if err != nil {
		cancel()
		return errorOf(err, j.param)
	}
	events := make(chan event)
	var wait sync.WaitGroup
	for _, c := range choices {
		wait.Go(func() { s.follow(ctx, c, events) })
	}
	defer func() { // what is left of the answers is given up, and waited for
		cancel()
		wait.Wait()
		record.end(choices)
	}()
	if j.stream {
		return s.streamed(ctx, w, j, choices, events)
	}
	return whole(ctx, w, j, choices, events)
}

// submit queues every choice of the job, all or none: the end of ctx takes back those that are queued.
func (s *Server) submit(ctx context.Context, j *job) ([]*choice, error) {
	var choices []*choice
	for _, in := range j.prompts {
		streams, err := j.model.Scheduler.SubmitChoices(ctx, s.request(j, in), j.choices)
		if err != nil {
			return nil, err
		}
		for _, stream := range streams {
			t, err := newTranscript(j.model.Tokenizer, j.stop, j.logprobs)
			if err != nil {
				return nil, err
			}
			choices = append(choices, &choice{input: in, index: len(choices), transcript: *t, stream: stream})
		}
	}
	return choices, nil
}

func (s *Server) request(j *job, in input) batch.Request {
	req := batch.Request{
		Prompt: in.ids, MaxTokens: j.maxTokens, Sampler: j.sampler, EOS: j.model.EOS, IgnoreEOS: j.ignoreEOS,
		TopN: j.topN, Logprob: j.logprobs, WantScores: j.scores, Priority: j.priority,
	}
	if req.MaxTokens == 0 {
		req.MaxTokens = max(1, min(s.cfg.DefaultMaxTokens, j.model.Scheduler.Limit()-len(in.ids)))
	}
	if s.cfg.Timeout > 0 {
		req.Deadline = s.now().Add(s.cfg.Timeout)
	}
	return req
}

// follow turns the tokens of a choice into events until it has ended or ctx has.
func (s *Server) follow(ctx context.Context, c *choice, events chan<- event) {
	send := func(e event) bool {
		select {
		case events <- e:
			return true
		case <-ctx.Done():
			return false
		}
	}
	for first := true; ; first = false {
		select {
		case <-c.stream.Signal():
		case <-ctx.Done():
			return
		}
		tokens, done := c.stream.Take()
		if first {
			c.scores = c.stream.PromptScores()
		}
		s.countGaps(c, tokens)
		e := event{choice: c, piece: c.read(tokens)}
		if c.stopped && !done { // what runs past the stop string is the scheduler's to drop
			c.stream.Stop(c.generated)
		}
		if done {
			e = c.close(e)
		}
		if !send(e) || done {
			return
		}
	}
}

func (s *Server) countGaps(c *choice, tokens []batch.Token) {
	for _, t := range tokens {
		if !c.latest.IsZero() {
			s.cfg.Metrics.Gap(t.At.Sub(c.latest))
		}
		c.latest = t.At
	}
}

// read takes tokens as they come.
func (c *choice) read(tokens []batch.Token) piece {
	var p piece
	for _, t := range tokens {
		p.add(c.push(t))
	}
	return p
}

// close completes the last event of a choice.
func (c *choice) close(e event) event {
	result, err := c.stream.Result()
	if result != nil {
		c.timings, c.reason = result.Timings, result.FinishReason
	}
	e.done, e.err = true, err
	if err != nil {
		return e
	}
	e.add(c.finish())
	if c.stopped {
		c.reason = batch.FinishStop
	}
	return e
}

// whole gathers all choices and answers with one object.
func whole(ctx context.Context, w http.ResponseWriter, j *job, choices []*choice, events <-chan event) *Error {
	for left := len(choices); left > 0; {
		select {
		case e := <-events:
			if e.err != nil {
				return errorOf(e.err, j.param)
			}
			e.choice.text += e.piece.text
			e.choice.tokens = append(e.choice.tokens, e.piece.tokens...)
			if e.done {
				left--
			}
		case <-ctx.Done():
			return errorOf(context.Cause(ctx), j.param)
		}
	}
	list := make([]any, len(choices))
	for i, c := range choices {
		list[i] = j.format.whole(c)
	}
	writeJSON(w, http.StatusOK, j.format.response(list, j.usage(choices)))
	return nil
}

func (j *job) usage(choices []*choice) usage {
	var u usage
	for _, in := range j.prompts {
		u.Prompt += len(in.ids)
	}
	for _, c := range choices {
		u.Completion += c.generated
	}
	u.Total = u.Prompt + u.Completion
	return u
}

// streamed writes the choices as they grow. An error of a stream that has begun is its last event as well.
func (s *Server) streamed(ctx context.Context, w http.ResponseWriter, j *job, choices []*choice, events <-chan event) *Error {
	out := newEventWriter(w, s.cfg.WriteTimeout)
	alive := time.NewTicker(s.cfg.KeepAlive)
	defer alive.Stop()
	opened := make([]bool, len(choices))
	for left := len(choices); left > 0; {
		select {
		case e := <-events:
			if e.err != nil {
				return out.fail(errorOf(e.err, j.param))
			}
			out.grow(j, e, !opened[e.index])
			opened[e.index] = true
			if e.done {
				left--
			}
		case <-alive.C:
			out.comment()
		case <-ctx.Done():
			return out.fail(errorOf(context.Cause(ctx), j.param))
		}
		if err := out.flush(); err != nil {
			return errorOf(errors.Join(context.Canceled, err), "")
		}
	}
	if j.includeUsage {
		u := j.usage(choices)
		out.event(j.format.chunk(nil, &u))
	}
	out.end()
	if err := out.flush(); err != nil {
		return errorOf(errors.Join(context.Canceled, err), "")
	}
	return nil
}

// grow queues the events that a choice's news make.
func (out *eventWriter) grow(j *job, e event, first bool) {
	list := []any{j.format.delta(e.choice, e.piece)}
	if first {
		list = append([]any{j.format.open(e.choice)}, list...)
	}
	if e.done {
		list = append(list, j.format.end(e.choice))
	}
	for _, choice := range list {
		if choice != nil {
			out.event(j.format.chunk(choice, nil))
		}
	}
}
