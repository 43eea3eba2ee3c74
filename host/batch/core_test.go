package batch

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/mlxcel/mlxcel/host/kvledger"
	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/sdk"
)

// TestCore runs the files of testdata/core, which read as the specification of what is scheduled when.
//
//	new [stages=1] [active=4] [batch=4] [queue=4] [micro=0] [chunk=8] [decode-chunk=0] [budget=0] [policy=<name>]
//	    [groups] [patience=<duration>] [whole]
//	at <duration>                                    the clock
//	submit <name> prompt=<n> max=<n> [priority=<n>] [deadline=<duration>] [scores] [choices=<n>]
//	                                                 choices are named <name>0, <name>1 and so on
//	reserved <name> [error=memory|broken|unsupported]
//	                                                 its sequence is there
//	done <flight> [eos=<name>] [failed=<name>] [spoiled=<name>]
//	                                                 the step has ended; each stream got token 1, or the EOS 9
//	cancel <name> | stop <name> | lost | resume
//
// Each prints what is to be done about it.
func TestCore(t *testing.T) {
	datadriven.Walk(t, "testdata/core", func(t *testing.T, path string) {
		var r *coreRun
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			if d.Cmd == "new" {
				r = newCoreRun(t, d)
				return "ok\n"
			}
			return r.event(t, d)
		})
	})
}

const testEOS = 9

type coreRun struct {
	c       *core
	now     time.Time
	lastSeq sdk.SeqID
	jobs    map[string]*job
	names   map[*job]string
	bySeq   map[sdk.SeqID]string
}

func newCoreRun(t *testing.T, d *datadriven.TestData) *coreRun {
	cfg := coreConfig{stages: 1, maxActive: 4, maxBatch: 4, maxQueue: 4, maxStall: 2}
	chunk, budget, policy, patience := 8, 0, "", ""
	anyPieces := !d.HasArg("whole")
	d.MaybeScanArgs(t, "stages", &cfg.stages)
	d.MaybeScanArgs(t, "active", &cfg.maxActive)
	d.MaybeScanArgs(t, "batch", &cfg.maxBatch)
	d.MaybeScanArgs(t, "queue", &cfg.maxQueue)
	d.MaybeScanArgs(t, "micro", &cfg.microBatch)
	d.MaybeScanArgs(t, "decode-chunk", &cfg.decodeChunk)
	d.MaybeScanArgs(t, "chunk", &chunk)
	d.MaybeScanArgs(t, "budget", &budget)
	d.MaybeScanArgs(t, "policy", &policy)
	d.MaybeScanArgs(t, "patience", &patience)
	cfg.preemption = PreemptionPolicy(policy)
	cfg.admissionWait = duration(t, patience)
	if d.HasArg("groups") {
		cfg.speeds = linearSpeeds(cfg.stages, 1, 1, 0)
	}
	ledger, err := kvledger.New(kvledger.Config{Stages: stagesOf(cfg.stages, int64(budget), 4), Preemption: policy != "", Threshold: 1})
	if err != nil {
		t.Fatal(err)
	}
	r := &coreRun{c: newCore(cfg, ledger), now: time.Unix(0, 0), jobs: map[string]*job{}, names: map[*job]string{}, bySeq: map[sdk.SeqID]string{}}
	r.c.resume(r.now, chunk, anyPieces, r.newSeq)
	return r
}

func (r *coreRun) newSeq() sdk.SeqID {
	r.lastSeq++
	return r.lastSeq
}

func duration(t *testing.T, text string) time.Duration {
	if text == "" {
		return 0
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func (r *coreRun) event(t *testing.T, d *datadriven.TestData) string {
	var name string
	if len(d.CmdArgs) > 0 {
		name = d.CmdArgs[0].Key
	}
	switch d.Cmd {
	case "at":
		r.now = time.Unix(0, 0).Add(duration(t, name))
	case "submit":
		if err := r.submit(t, d, name); err != nil {
			return err.Error() + "\n"
		}
	case "reserved":
		r.c.reserved(r.now, r.jobs[name], r.reserveError(t, d))
	case "done":
		r.done(t, d, name)
	case "cancel":
		r.c.cancel(r.now, r.jobs[name], errors.New("the client left"))
	case "stop":
		r.c.stop(r.now, r.jobs[name])
	case "lost":
		r.c.lost(r.now, stageError(1))
	case "resume":
		r.c.resume(r.now, r.c.chunk, !r.c.whole, r.newSeq)
	default:
		t.Fatalf("unknown command %q", d.Cmd)
	}
	r.c.expire(r.now)
	r.c.decide(r.now)
	return r.print(r.c.take())
}

func (r *coreRun) submit(t *testing.T, d *datadriven.TestData, name string) error {
	req := Request{EOS: []int32{testEOS}, WantScores: d.HasArg("scores")}
	var prompt int
	deadline := ""
	d.ScanArgs(t, "prompt", &prompt)
	d.ScanArgs(t, "max", &req.MaxTokens)
	d.MaybeScanArgs(t, "priority", &req.Priority)
	d.MaybeScanArgs(t, "deadline", &deadline)
	if deadline != "" {
		req.Deadline = time.Unix(0, 0).Add(duration(t, deadline))
	}
	for i := range prompt {
		req.Prompt = append(req.Prompt, int32(i))
	}
	choices := 0
	d.MaybeScanArgs(t, "choices", &choices)
	var jobs []*job
	for i := range max(1, choices) {
		j, called := &job{id: uint64(len(r.jobs) + 1), req: &req}, name
		if choices > 0 {
			called += strconv.Itoa(i)
		}
		r.jobs[called], r.names[j] = j, called
		jobs = append(jobs, j)
	}
	return r.c.submit(r.now, jobs...)
}

func (r *coreRun) reserveError(t *testing.T, d *datadriven.TestData) error {
	kind := ""
	d.MaybeScanArgs(t, "error", &kind)
	switch kind {
	case "memory":
		return &pipeline.StageError{Place: sdk.Place{Stage: r.c.cfg.stages - 1}, Plugin: "fake", Phase: pipeline.PhaseReserve, Err: sdk.Errorf(sdk.CodeOutOfMemory, "no room")}
	case "broken":
		return stageError(0)
	case "unsupported":
		return &pipeline.StageError{Place: sdk.Place{Stage: 0}, Plugin: "fake", Phase: pipeline.PhaseReserve, Err: sdk.Errorf(sdk.CodeUnsupported, "the window has passed")}
	}
	return nil
}

func (r *coreRun) done(t *testing.T, d *datadriven.TestData, id string) {
	eos, failed, spoiled := "", "", ""
	d.MaybeScanArgs(t, "eos", &eos)
	d.MaybeScanArgs(t, "failed", &failed)
	d.MaybeScanArgs(t, "spoiled", &spoiled)
	i := slices.IndexFunc(r.c.flights, func(f *flight) bool { return fmt.Sprint(f.id) == id })
	if i < 0 {
		t.Fatalf("%s: flight %s is not under way", d.Pos, id)
	}
	f := r.c.flights[i]
	results := make([]sdk.SeqResult, len(f.pieces))
	var failures []pipeline.StepFailure
	for i, p := range f.pieces {
		results[i] = sdk.SeqResult{Seq: p.job.seq, Token: -1}
		switch name := r.names[p.job]; {
		case name == failed:
			failures = append(failures, pipeline.StepFailure{Seqs: []sdk.SeqID{p.job.seq}, Err: stageError(0)})
		case name == spoiled:
			failures = append(failures, pipeline.StepFailure{Seqs: []sdk.SeqID{p.job.seq}, Err: &pipeline.SpoiledError{Err: stageError(0)}})
		case p.want == sdk.WantScores:
			results[i].Scores = make([]float32, p.rows)
		case p.want == sdk.WantToken && name == eos:
			results[i].Token = testEOS
		case p.want == sdk.WantToken:
			results[i].Token = 1
		}
	}
	var err error
	if len(failures) > 0 {
		err = &pipeline.StepError{Failures: failures}
	}
	r.c.stepped(r.now, f, results, err)
}

// print tells a step as name[first position:end), with ' for prompt rows and a suffix for what is wanted.
func (r *coreRun) print(o orders) string {
	var b strings.Builder
	for _, seq := range o.release {
		fmt.Fprintf(&b, "release %s\n", r.bySeq[seq])
	}
	for _, j := range o.reserve {
		r.bySeq[j.seq] = r.names[j]
		fmt.Fprintf(&b, "reserve %s", r.names[j])
		if j.from != nil {
			fmt.Fprintf(&b, " with %d of %s", j.fed, r.names[j.from])
		}
		b.WriteByte('\n')
	}
	for _, f := range o.steps {
		fmt.Fprintf(&b, "step %d:", f.id)
		for i, p := range f.pieces {
			s := f.steps[i]
			role := ""
			if s.Prompt {
				role = "'"
			}
			want := [...]string{"", " token", " scores", " logits"}[s.Want]
			if s.Snapshot {
				want += " snapshot"
			}
			fmt.Fprintf(&b, " %s%s[%d:%d]%s", r.names[p.job], role, s.Pos, s.End(), want)
		}
		b.WriteByte('\n')
	}
	for _, f := range o.abort {
		fmt.Fprintf(&b, "abort %d\n", f.id)
	}
	for _, d := range o.tokens {
		fmt.Fprintf(&b, "token %s\n", r.names[d.job])
	}
	for _, u := range o.unshared {
		fmt.Fprintf(&b, "unshared %s (%v)\n", r.names[u.job], u.err)
	}
	for _, j := range o.ended {
		fmt.Fprintf(&b, "end %s %s", r.names[j], j.reason)
		if j.err != nil {
			fmt.Fprintf(&b, "(%v)", j.err)
		}
		b.WriteByte('\n')
	}
	if b.Len() == 0 {
		return "nothing\n"
	}
	return b.String()
}
