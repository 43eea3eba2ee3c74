package batch

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/mlxcel/mlxcel/host/kvledger"
)

// PreemptionPolicy picks the sequence that loses its place when KV memory runs short.
type PreemptionPolicy string

const (
	PreemptNone           PreemptionPolicy = ""
	PreemptLRU            PreemptionPolicy = "lru"             // the one that has waited longest for its next token
	PreemptLongest        PreemptionPolicy = "longest"         // the one with the most positions
	PreemptLowestPriority PreemptionPolicy = "lowest-priority" // the one of the lowest priority
)

// Config is what a scheduler is made of.
type Config struct {
	Runtime Runtime
	Ledger  kvledger.Config // its Preemption is set from the policy below, its Stages are the runtime's

	MaxActive  int // requests that have joined at most (--parallel); 0 means 16
	MaxBatch   int // sequences of one step at most (--max-batch-size); 0 means MaxActive
	MaxQueue   int // requests that wait at most (--max-queue-depth); 0 means 256
	MicroBatch int // sequences of one step, as asked for (--pp-micro-batch-size); 0 lets Speeds decide
	VocabSize  int // token ids must lie below it; 0 leaves that to the executor

	DecodeChunk int     // prompt rows of one step while streams are running; 0 lets the measured step time decide
	MaxStall    float64 // how much longer than a step without prompt rows one with them may take, more than 1; 0 means 2

	Speeds     *Speeds          // of Measure; nil means one group in flight
	Preemption PreemptionPolicy // off unless set

	// AdmissionWait is how long a request at the head of the queue waits for KV memory before it ends with a
	// *kvledger.AdmissionDiagnostic; 0 means until its deadline.
	AdmissionWait time.Duration

	// Relaunch brings a lost runtime up again, and first ends what is left of the old one. Its stages may be cut differently:
	// the ledger's configuration that it returns takes Ledger's place, nil keeps it. nil means that a loss is
	// for good.
	Relaunch         func(ctx context.Context) (Runtime, *kvledger.Config, error)
	RelaunchAttempts int           // in a row; 0 means 5
	RelaunchBackoff  time.Duration // before the second attempt, doubling up to a minute; 0 means 1 s
	// RefuseWhileLost ends the waiting requests of a lost runtime with an *UnavailableError, and refuses new ones until it
	// is back: for a runtime whose return nobody can promise. Off, they wait, each until its deadline.
	RefuseWhileLost bool

	Clock  Clock        // nil means the system's
	Logger hclog.Logger // nil means none
}

const (
	defaultMaxActive        = 16
	defaultMaxQueue         = 256
	defaultMaxStall         = 2
	defaultRelaunchAttempts = 5
	defaultRelaunchBackoff  = time.Second
	maxRelaunchBackoff      = time.Minute
)

// Validate returns all faults at once.
func (c Config) Validate() error {
	faults := []error{c.Ledger.Validate()}
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	if c.Runtime == nil {
		fault("scheduler config has no runtime")
	}
	for _, f := range []struct {
		name  string
		value int
	}{
		{"--parallel", c.MaxActive}, {"--max-batch-size", c.MaxBatch}, {"--max-queue-depth", c.MaxQueue},
		{"--pp-micro-batch-size", c.MicroBatch}, {"prompt rows beside running streams", c.DecodeChunk},
		{"vocabulary size", c.VocabSize}, {"relaunch attempts", c.RelaunchAttempts},
	} {
		if f.value < 0 {
			fault("%s %d: want at least 1, or 0 for the default", f.name, f.value)
		}
	}
	if c.MaxStall != 0 && !(c.MaxStall > 1) {
		fault("stall factor %g: want more than 1, or 0 for the default", c.MaxStall)
	}
	if c.AdmissionWait < 0 || c.RelaunchBackoff < 0 {
		fault("admission wait %v, relaunch backoff %v: want 0 or more", c.AdmissionWait, c.RelaunchBackoff)
	}
	switch c.Preemption {
	case PreemptNone, PreemptLRU, PreemptLongest, PreemptLowestPriority:
	default:
		fault("--preemption-policy %q: want %s, %s or %s", c.Preemption, PreemptLRU, PreemptLongest, PreemptLowestPriority)
	}
	return errors.Join(faults...)
}

func (c Config) withDefaults() Config {
	orDefault(&c.MaxActive, defaultMaxActive)
	orDefault(&c.MaxBatch, c.MaxActive)
	orDefault(&c.MaxQueue, defaultMaxQueue)
	orDefault(&c.MaxStall, defaultMaxStall)
	orDefault(&c.RelaunchAttempts, defaultRelaunchAttempts)
	orDefault(&c.RelaunchBackoff, defaultRelaunchBackoff)
	if c.Clock == nil {
		c.Clock = SystemClock{}
	}
	if c.Logger == nil {
		c.Logger = hclog.NewNullLogger()
	}
	c.Ledger.Preemption = c.Preemption != PreemptNone
	return c
}

func orDefault[T comparable](v *T, d T) {
	if *v == *new(T) {
		*v = d
	}
}

func (c Config) core() coreConfig {
	return coreConfig{
		stages: len(c.Ledger.Stages), maxActive: c.MaxActive, maxBatch: c.MaxBatch, maxQueue: c.MaxQueue, microBatch: c.MicroBatch,
		decodeChunk: c.DecodeChunk, maxStall: c.MaxStall, admissionWait: c.AdmissionWait, speeds: c.Speeds, preemption: c.Preemption,
	}
}

// Clock is where a scheduler gets the time from.
type Clock interface {
	Now() time.Time
	// AfterFunc calls f once, on a goroutine of its own, after d. stop prevents that, and tells whether it was in time.
	AfterFunc(d time.Duration, f func()) (stop func() bool)
}

// SystemClock is the machine's clock.
type SystemClock struct{}

// Now is Clock's.
func (SystemClock) Now() time.Time { return time.Now() }

// AfterFunc is Clock's.
func (SystemClock) AfterFunc(d time.Duration, f func()) (stop func() bool) {
	return time.AfterFunc(d, f).Stop
}
