package api

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/mlxcel/mlxcel/host/batch"
	"github.com/mlxcel/mlxcel/host/kvledger"
	"github.com/mlxcel/mlxcel/sdk"
)

// letters is a runtime that says, again and again, the letter of a sequence's choice.
type letters struct {
	mu   sync.Mutex
	last sdk.SeqID
	seqs map[sdk.SeqID]sdk.Reservation
	fed  map[sdk.SeqID]int
	rows int // of prompts
	id   func(choice uint32) int32
	done chan struct{}
}

func (l *letters) NewSeq() sdk.SeqID     { l.last++; return l.last }
func (l *letters) PrefillChunk() int     { return 64 }
func (l *letters) AnyPieces() bool       { return true }
func (l *letters) Done() <-chan struct{} { return l.done }
func (l *letters) Err() error            { return nil }

func (l *letters) Reserve(_ context.Context, r sdk.Reservation) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r.Keep > 0 && l.fed[r.From] < r.Keep {
		return sdk.Errorf(sdk.CodeInvalid, "sequence %d has %d positions, not %d", r.From, l.fed[r.From], r.Keep)
	}
	l.seqs[r.Seq], l.fed[r.Seq] = r, r.Keep
	return nil
}

func (l *letters) Release(_ context.Context, seq sdk.SeqID) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.seqs, seq)
	delete(l.fed, seq)
	return nil
}

func (l *letters) Begin(_ context.Context, steps []sdk.SeqStep) func() ([]sdk.SeqResult, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	results := make([]sdk.SeqResult, len(steps))
	for i, q := range steps {
		results[i] = sdk.SeqResult{Seq: q.Seq, Token: -1}
		if q.Prompt {
			l.rows += q.Rows
		}
		if q.Want == sdk.WantToken {
			results[i].Token = l.id(l.seqs[q.Seq].Sampler.Choice)
		}
		l.fed[q.Seq] = q.End()
	}
	return func() ([]sdk.SeqResult, error) { return results, nil }
}

// Each choice is its own, streamed or not, and the prompt is counted and computed once.
func TestChoicesEndToEnd(t *testing.T) {
	for _, stream := range []bool{false, true} {
		r := newRig(t)
		ids := make([]int32, 8)
		for i := range ids {
			ids[i] = byteToken(t, byte('a'+i))
		}
		l := &letters{
			seqs: map[sdk.SeqID]sdk.Reservation{}, fed: map[sdk.SeqID]int{}, done: make(chan struct{}),
			id: func(choice uint32) int32 { return ids[choice] },
		}
		s, err := batch.New(batch.Config{Runtime: l, VocabSize: tinyVocab, Ledger: kvledger.Config{Stages: []kvledger.Stage{{}}}})
		if err != nil {
			t.Fatal(err)
		}
		r.model.Scheduler = Batch{s}
		prompt := strings.TrimSuffix(strings.Repeat("65,", 2000), ",")
		w := r.post("/v1/completions", fmt.Sprintf(`{"prompt":[%s],"n":8,"max_tokens":3,"stream":%t,"stream_options":%s}`,
			prompt, stream, map[bool]string{true: `{"include_usage":true}`, false: "null"}[stream]))
		s.Close()
		bodies := []string{w.Body.String()}
		if stream {
			bodies = events(t, w.Body.String())
		}
		texts, prompted := make([]string, 8), 0
		for _, body := range bodies {
			if body == "[DONE]" {
				continue
			}
			var got struct {
				Choices []struct {
					Index int
					Text  string
				}
				Usage *usage
			}
			if err := json.Unmarshal([]byte(body), &got); err != nil || w.Code != http.StatusOK {
				t.Fatalf("%d %s: %v", w.Code, body, err)
			}
			for _, c := range got.Choices {
				texts[c.Index] += c.Text
			}
			if got.Usage != nil {
				prompted = got.Usage.Prompt
			}
		}
		for i, text := range texts {
			if want := strings.Repeat(string(rune('a'+i)), 3); text != want {
				t.Errorf("stream %t: choice %d says %q, want %q", stream, i, text, want)
			}
		}
		if prompted != 2000 || l.rows != 2007 {
			t.Errorf("stream %t: prompt of %d tokens, %d rows computed, want 2000 and 2007", stream, prompted, l.rows)
		}
	}
}
