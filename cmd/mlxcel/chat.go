package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/mlxcel/mlxcel/host/chat"
	"github.com/mlxcel/mlxcel/host/engine"
	"github.com/mlxcel/mlxcel/host/generate"
	"github.com/urfave/cli/v2"
)

func chatCommand() *cli.Command {
	flags := []cli.Flag{modelFlag(), &cli.StringFlag{Name: "system", Usage: "system message `TEXT`"}, dtypeFlag()}
	flags = append(flags, samplingFlags()...)
	flags = append(flags, pipelineFlags()...)
	return &cli.Command{
		Name:        "chat",
		Usage:       "a conversation",
		Description: "/clear forgets the conversation; /exit or the end of input ends it.",
		Flags:       append(flags, pluginFlags()...),
		Action:      runChat,
	}
}

func runChat(c *cli.Context) (err error) {
	cfg := engineConfig(c)
	if err := setPipeline(c, &cfg); err != nil {
		return err
	}
	if err := setModel(c, &cfg); err != nil {
		return err
	}
	req, err := readRequest(c)
	if err != nil {
		return err
	}
	e, err := engine.Open(c.Context, cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close(c.Context)) }()
	if c.Bool("verbose") {
		fmt.Fprintln(c.App.ErrWriter, e.Pipeline.Report())
	}
	s := &session{c: c, e: e, req: req}
	if c.IsSet("system") {
		m, err := message("system", c.String("system"))
		if err != nil {
			return fmt.Errorf("--system: %w", err)
		}
		s.system = []chat.Message{m}
	}
	s.clear()
	return s.loop(c.Context)
}

// session is a conversation.
type session struct {
	c        *cli.Context
	e        *engine.Engine
	req      engine.Request
	system   []chat.Message // none or one
	messages []chat.Message
}

func (s *session) clear() { s.messages = slices.Clone(s.system) }

func (s *session) loop(ctx context.Context) error {
	lines, done := readLines(ctx, s.c.App.Reader)
	defer done()
	for {
		fmt.Fprint(s.c.App.ErrWriter, "> ")
		select {
		case <-ctx.Done():
			return ctx.Err()
		case line, ok := <-lines:
			if !ok || line.text == "/exit" {
				return line.err
			}
			if err := s.turn(ctx, strings.TrimSpace(line.text)); err != nil {
				return err
			}
		}
	}
}

func (s *session) turn(ctx context.Context, text string) error {
	switch text {
	case "":
		return nil
	case "/clear":
		s.clear()
		return nil
	}
	before := s.messages
	m, err := message("user", text)
	var result *generate.Result
	if err == nil {
		s.messages = append(s.messages, m)
		result, err = s.answer(ctx)
	}
	switch {
	case ctx.Err() != nil || s.e.Pipeline.Err() != nil:
		return err
	case err != nil: // this turn's fault: the conversation goes on without it
		fmt.Fprintf(s.c.App.ErrWriter, "mlxcel: %v\n", err)
		s.messages = before
		return nil
	}
	s.messages = append(s.messages, chat.Message{Role: "assistant", Content: chat.Text(result.Text)})
	fmt.Fprintln(s.c.App.ErrWriter, footer(s.e, result))
	return nil
}

func (s *session) answer(ctx context.Context) (*generate.Result, error) {
	req := s.req
	var err error
	if req.Prompt, err = s.e.Prompt(s.messages, false); err != nil {
		return nil, err
	}
	if req.MaxTokens, err = maxTokens(s.c, s.e, len(req.Prompt)); err != nil {
		return nil, err
	}
	result, err := s.e.Answer(ctx, req, func(ev generate.Event) error {
		_, err := io.WriteString(s.c.App.Writer, ev.Text)
		return err
	})
	fmt.Fprintln(s.c.App.Writer)
	return result, err
}

// line is one line of input, or the error that ended it.
type line struct {
	text string
	err  error
}

// readLines reads lines on a goroutine of its own, so that a signal is heard while the program waits for one. A read that
// is under way can't be cut short: the goroutine then ends with the program.
func readLines(ctx context.Context, r io.Reader) (<-chan line, func()) {
	ctx, cancel := context.WithCancel(ctx)
	out := make(chan line)
	go func() {
		defer close(out)
		in := bufio.NewReader(r)
		for {
			text, err := in.ReadString('\n')
			if err != nil && text == "" {
				if err != io.EOF {
					send(ctx, out, line{err: err})
				}
				return
			}
			if !send(ctx, out, line{text: strings.TrimRight(text, "\r\n")}) {
				return
			}
		}
	}()
	return out, cancel
}

func send(ctx context.Context, out chan<- line, l line) bool {
	select {
	case out <- l:
		return true
	case <-ctx.Done():
		return false
	}
}
