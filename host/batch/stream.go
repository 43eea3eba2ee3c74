package batch

import (
	"sync"
	"time"
)

// Stream is the answer to one request as it comes. It is safe for concurrent use, but has one reader: Signal, Take and
// Wait hand each token out once.
type Stream struct {
	scheduler *Scheduler
	job       *job
	prompt    int
	detach    func() bool // from the request's context
	signal    chan struct{}

	mu      sync.Mutex
	tokens  []Token
	taken   int
	scores  []float32
	stopped bool // by Stop
	result  *Result
	err     error

	submitted, joined time.Time
	preempted         int
}

func newStream(s *Scheduler, j *job) *Stream {
	return &Stream{scheduler: s, job: j, prompt: len(j.req.Prompt), signal: make(chan struct{}, 1)}
}

// ID names the request in Status and logs.
func (s *Stream) ID() uint64 { return s.job.id }

// Signal gets a value when there is something to Take.
func (s *Stream) Signal() <-chan struct{} { return s.signal }

// Take returns the tokens that came since it was last called, and whether the answer has ended: no more will come.
func (s *Stream) Take() (tokens []Token, done bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	tokens = s.tokens[s.taken:]
	s.taken = len(s.tokens)
	return tokens[:len(tokens):len(tokens)], s.result != nil
}

// PromptScores returns the scores of the prompt's tokens but the first, where they were asked for; nil before the
// first token, or the end where there is none.
func (s *Stream) PromptScores() []float32 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.scores
}

// Result returns what the request came to, and why it failed; nil, nil before it has ended.
func (s *Stream) Result() (*Result, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.result, s.err
}

// Stop ends the answer after its first n tokens, with FinishStop. What the model ran past them is dropped, and so is
// an error that came later.
func (s *Stream) Stop(n int) {
	now := s.scheduler.cfg.Clock.Now()
	s.mu.Lock()
	s.stopped = true
	s.tokens = s.tokens[:max(0, min(n, len(s.tokens)))]
	s.taken = len(s.tokens)
	s.end(now, FinishStop, nil)
	s.mu.Unlock()
	s.scheduler.stopJob(s.job)
}

// Wait calls emit with each token as it comes, until it returns true, which stops the answer there, or the answer
// ends. emit runs on the caller's goroutine: a slow one delays nobody else. nil means that nobody looks.
func (s *Stream) Wait(emit func(Token) (stop bool)) (*Result, error) {
	seen := 0
	for {
		tokens, done := s.Take()
		for _, t := range tokens {
			seen++
			if emit != nil && emit(t) {
				s.Stop(seen)
				return s.Result()
			}
		}
		if done {
			return s.Result()
		}
		<-s.signal
	}
}

// push adds a token; the scheduler calls it.
func (s *Stream) push(j *job, t Token) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return
	}
	s.follow(j)
	s.tokens = append(s.tokens, t)
	s.wake()
}

// finish ends the answer; the scheduler calls it.
func (s *Stream) finish(j *job) {
	s.detach()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.follow(j)
	if !s.stopped {
		s.end(j.endedAt, j.reason, j.err)
	}
}

// follow copies what the result tells of the job's way.
func (s *Stream) follow(j *job) {
	s.submitted, s.joined, s.preempted = j.submitted, j.joined, j.preempted
	if j.req.WantScores && len(j.scores) == s.prompt-1 {
		s.scores = j.scores
	}
}

func (s *Stream) end(at time.Time, reason FinishReason, err error) {
	s.err = err
	s.result = &Result{
		Tokens: s.tokens, PromptScores: s.scores, FinishReason: reason, PromptTokens: s.prompt,
		Timings: s.timings(at),
	}
	s.wake()
}

func (s *Stream) timings(end time.Time) Timings {
	if s.submitted.IsZero() {
		return Timings{}
	}
	t := Timings{Queued: end.Sub(s.submitted), Total: end.Sub(s.submitted), Preempted: s.preempted}
	if !s.joined.IsZero() {
		t.Queued = s.joined.Sub(s.submitted)
	}
	if n := len(s.tokens); n > 0 {
		t.FirstToken = s.tokens[0].At.Sub(s.submitted)
		t.Decode = s.tokens[n-1].At.Sub(s.tokens[0].At)
	}
	return t
}

func (s *Stream) wake() {
	select {
	case s.signal <- struct{}{}:
	default:
	}
}
