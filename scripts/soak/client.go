package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"time"
)

// Kinds of requests.
const (
	kindWhole = "whole" // to its end
	kindLeft  = "left"  // given up after a few tokens
	kindLong  = "long"  // with a long prompt
	kindBad   = "bad"   // to be refused
)

// longPrompt is in words, most of which are one token.
const longPrompt = 1200

// client makes one request after another.
type client struct {
	url   string
	http  http.Client
	tally *tally
	rand  *rand.Rand
}

func newClient(url string, t *tally, seed uint64) *client {
	return &client{url: url, http: http.Client{Transport: &http.Transport{}}, tally: t, rand: rand.New(rand.NewPCG(seed, 0))}
}

func (c *client) request(ctx context.Context) {
	kind := kindWhole
	switch n := c.rand.IntN(20); {
	case n < 4:
		kind = kindLeft
	case n < 6:
		kind = kindLong
	case n < 7:
		kind = kindBad
	}
	gaps, err := c.stream(ctx, kind)
	if ctx.Err() != nil {
		return
	}
	c.tally.add(kind, gaps, err)
}

func (c *client) body(kind string) []byte {
	words := 3 + c.rand.IntN(40)
	if kind == kindLong {
		words = longPrompt
	}
	var prompt strings.Builder
	for range words {
		fmt.Fprintf(&prompt, "%s ", [...]string{"the", "river", "light", "under", "seven", "a", "house", "of"}[c.rand.IntN(8)])
	}
	body := map[string]any{
		"prompt": prompt.String(), "stream": true, "max_tokens": 16 + c.rand.IntN(80), "temperature": 1, "seed": c.rand.Int64(), "ignore_eos": true,
	}
	if kind == kindBad {
		body["temperature"] = "hot"
	}
	raw, err := json.Marshal(body)
	if err != nil {
		panic(err) // strings and numbers always have a JSON form
	}
	return raw
}

// stream makes a request and returns the gaps between its tokens.
func (c *client) stream(ctx context.Context, kind string) ([]time.Duration, error) {
	ctx, leave := context.WithCancel(ctx)
	defer leave()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url+"/v1/completions", bytes.NewReader(c.body(kind)))
	if err != nil {
		return nil, err
	}
	answer, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	if kind == kindBad {
		_, err := io.Copy(io.Discard, answer.Body)
		if answer.StatusCode != http.StatusBadRequest {
			return nil, fmt.Errorf("status %d", answer.StatusCode)
		}
		return nil, err
	}
	if answer.StatusCode != http.StatusOK {
		raw, _ := io.ReadAll(answer.Body)
		return nil, fmt.Errorf("status %d: %s", answer.StatusCode, raw)
	}
	return c.tokens(answer.Body, kind)
}

func (c *client) tokens(body io.Reader, kind string) (gaps []time.Duration, err error) {
	leaveAfter := 1 + c.rand.IntN(10)
	lines := bufio.NewScanner(body)
	var last time.Time
	for lines.Scan() {
		data, isData := strings.CutPrefix(lines.Text(), "data: ")
		switch {
		case !isData:
			continue
		case data == "[DONE]":
			return gaps, nil
		case strings.HasPrefix(data, `{"error"`):
			return gaps, errors.New(data)
		case strings.Contains(data, `"finish_reason":null`):
			now := time.Now()
			if !last.IsZero() {
				gaps = append(gaps, now.Sub(last))
			}
			last = now
		}
		if kind == kindLeft && len(gaps) >= leaveAfter {
			return gaps, nil
		}
	}
	return gaps, errors.Join(lines.Err(), errors.New("the stream ends without [DONE]"))
}
