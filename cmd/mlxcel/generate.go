package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strconv"
	"strings"

	"github.com/mlxcel/mlxcel/cmd/internal/clusterflags"
	"github.com/mlxcel/mlxcel/cmd/internal/coordinate"
	"github.com/mlxcel/mlxcel/host/chat"
	"github.com/mlxcel/mlxcel/host/cluster/bringup"
	"github.com/mlxcel/mlxcel/host/engine"
	"github.com/mlxcel/mlxcel/host/generate"
	"github.com/mlxcel/mlxcel/host/tokenize"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/urfave/cli/v2"
)

func generateCommand() *cli.Command {
	flags := []cli.Flag{
		modelFlag(),
		&cli.StringFlag{Name: "prompt", Aliases: []string{"p"}, Usage: "the prompt's `TEXT`"},
		&cli.StringFlag{Name: "system", Usage: "system message `TEXT` before the prompt"},
		&cli.BoolFlag{Name: "no-chat-template", Usage: "take the prompt as it is"},
		dtypeFlag(),
		&cli.StringFlag{Name: "prompt-ids", Category: groupScripts, Usage: "token `IDS` in place of text, e.g. 1,2,3"},
		&cli.StringFlag{Name: "score-ids", Category: groupScripts, Usage: "feed these token `IDS` instead of the model's own choice and return each step's top logits"},
		&cli.IntFlag{Name: "logprobs", Category: groupScripts, Usage: "report the `N` most probable tokens of each step"},
		&cli.BoolFlag{Name: "json", Category: groupScripts, Usage: "print one JSON object instead of text"},
	}
	flags = append(flags, samplingFlags()...)
	flags = append(flags, pipelineFlags()...)
	flags = append(flags, clusterflags.FileFlags()...)
	return &cli.Command{
		Name:   "generate",
		Usage:  "answer one prompt",
		Flags:  append(flags, pluginFlags()...),
		Action: runGenerate,
	}
}

// scoreTop is how many logits --score-ids returns for each step where --logprobs does not say.
const scoreTop = 5

func runGenerate(c *cli.Context) (err error) {
	cfg := engineConfig(c)
	if err := setPipeline(c, &cfg); err != nil {
		return err
	}
	if err := setModel(c, &cfg); err != nil {
		return err
	}
	in, err := readInput(c)
	if err != nil {
		return err
	}
	req, err := readRequest(c)
	if err != nil {
		return err
	}
	e, err := openEngine(c, cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close(c.Context)) }()
	if req.Prompt, err = in.tokens(e); err != nil {
		return err
	}
	if req.MaxTokens, err = maxTokens(c, e, len(req.Prompt)); err != nil {
		return err
	}
	if c.Bool("verbose") {
		fmt.Fprintln(c.App.ErrWriter, e.Pipeline.Report())
	}
	if c.Bool("json") {
		return answerJSON(c.Context, c.App.Writer, e, req)
	}
	return answerText(c.Context, c.App.Writer, c.App.ErrWriter, e, req)
}

// openEngine loads the model on this machine, or on the peers of --distributed-config.
func openEngine(c *cli.Context, cfg engine.Config) (*engine.Engine, error) {
	if !c.IsSet("distributed-config") {
		return engine.Open(c.Context, cfg)
	}
	if c.IsSet("pp-size") {
		return nil, errors.New("--pp-size and --distributed-config exclude each other: the file says how many stages there are; --pp-layers cuts by hand")
	}
	settings, err := clusterflags.ReadFile(c, version)
	if err != nil {
		return nil, err
	}
	cluster, err := coordinate.New(c.Context, coordinate.Config{
		Cluster: settings, Engine: cfg, Demand: bringup.Demand{Pipeline: cfg.Pipeline},
		Shape: bringup.Shape{PrefillChunk: cfg.PrefillChunk, MicroBatch: cfg.Pipeline.MicroBatch()}, Logger: cfg.Logger,
	})
	if err != nil {
		return nil, err
	}
	return cluster.Open(c.Context)
}

// input is the prompt as the flags give it.
type input struct {
	messages []chat.Message
	raw      bool
	ids      []int32
}

func readInput(c *cli.Context) (*input, error) {
	if c.NArg() > 0 {
		return nil, fmt.Errorf("unexpected argument %q; the prompt goes with --prompt", c.Args().First())
	}
	if c.IsSet("prompt") == c.IsSet("prompt-ids") {
		return nil, errors.New("give either --prompt TEXT or --prompt-ids IDS")
	}
	if c.IsSet("prompt-ids") {
		if c.IsSet("system") {
			return nil, errors.New("--system takes part in the chat template, which --prompt-ids bypasses; leave it out")
		}
		ids, err := parseIDs("--prompt-ids", c.String("prompt-ids"))
		return &input{ids: ids}, err
	}
	in := &input{raw: c.Bool("no-chat-template")}
	if c.IsSet("system") {
		if in.raw {
			return nil, errors.New("--system takes part in the chat template; leave it or --no-chat-template out")
		}
		m, err := message("system", c.String("system"))
		if err != nil {
			return nil, fmt.Errorf("--system: %w", err)
		}
		in.messages = append(in.messages, m)
	}
	m, err := message("user", c.String("prompt"))
	if err != nil {
		return nil, fmt.Errorf("--prompt: %w", err)
	}
	in.messages = append(in.messages, m)
	return in, nil
}

// message refuses text that is not UTF-8: the model would be asked something else than was meant.
func message(role, text string) (chat.Message, error) {
	return chat.Message{Role: role, Content: chat.Text(text)}, tokenize.ValidateUTF8(text)
}

func (in *input) tokens(e *engine.Engine) ([]int32, error) {
	if in.ids != nil {
		return in.ids, nil
	}
	return e.Prompt(in.messages, in.raw)
}

func parseIDs(flag, list string) ([]int32, error) {
	ids := []int32{}
	for field := range strings.SplitSeq(list, ",") {
		id, err := strconv.ParseInt(strings.TrimSpace(field), 10, 32)
		if err != nil || id < 0 {
			return nil, fmt.Errorf("%s: %q is not a token id; give numbers from 0, separated by commas", flag, field)
		}
		ids = append(ids, int32(id))
	}
	return ids, nil
}

// readRequest reads the sampling flags. The prompt is filled in once the model is there.
func readRequest(c *cli.Context) (engine.Request, error) {
	r := engine.Request{Stop: stopTexts(c), IgnoreEOS: c.Bool("ignore-eos"), TopN: c.Int("logprobs")}
	if r.TopN < 0 {
		return r, fmt.Errorf("--logprobs %d: give 0 or more", r.TopN)
	}
	var err error
	if r.Sampler, err = readSampler(c); err != nil {
		return r, err
	}
	if c.IsSet("score-ids") {
		if r.Forced, err = parseIDs("--score-ids", c.String("score-ids")); err != nil {
			return r, err
		}
		if r.TopN == 0 {
			r.TopN = scoreTop
		}
	}
	return r, nil
}

func readSampler(c *cli.Context) (sdk.Sampler, error) {
	var faults []error
	number := func(flag string, ok func(float64) bool, want string) float32 {
		v := c.Float64(flag)
		if !ok(v) {
			faults = append(faults, fmt.Errorf("--%s %v: want %s", flag, v, want))
		}
		return float32(v)
	}
	finite := func(v float64) bool { return v-v == 0 }
	s := sdk.Sampler{
		Temperature:       number("temp", func(v float64) bool { return v >= 0 && finite(v) }, "0 or more"),
		TopP:              number("top-p", func(v float64) bool { return v > 0 && v <= 1 }, "more than 0 and at most 1"),
		MinP:              number("min-p", func(v float64) bool { return v >= 0 && v <= 1 }, "0 to 1"),
		RepetitionPenalty: number("repetition-penalty", func(v float64) bool { return v > 0 && finite(v) }, "more than 0"),
		PresencePenalty:   number("presence-penalty", finite, "a number"),
		FrequencyPenalty:  number("frequency-penalty", finite, "a number"),
		TopK:              c.Int("top-k"),
		Seed:              c.Uint64("seed"),
	}
	if s.TopK < 0 {
		faults = append(faults, fmt.Errorf("--top-k %d: want 0 or more", s.TopK))
	}
	if !c.IsSet("seed") {
		s.Seed = rand.Uint64()
	}
	return s, errors.Join(faults...)
}

// maxTokens returns what --max-tokens asks for. Its default gives way where the context has less room.
func maxTokens(c *cli.Context, e *engine.Engine, prompt int) (int, error) {
	n := c.Int("max-tokens")
	if n < 1 {
		return 0, fmt.Errorf("--max-tokens %d: want at least 1", n)
	}
	if room := e.Profile.ContextLength - prompt; !c.IsSet("max-tokens") && room > 0 && room < n {
		return room, nil
	}
	return n, nil
}

func answerText(ctx context.Context, out, notes io.Writer, e *engine.Engine, req engine.Request) error {
	result, err := e.Answer(ctx, req, func(ev generate.Event) error {
		_, err := io.WriteString(out, ev.Text)
		return err
	})
	if result != nil {
		fmt.Fprintln(out)
		fmt.Fprintln(notes, footer(e, result))
	}
	return err
}

func footer(e *engine.Engine, r *generate.Result) string {
	t := r.Timings
	return fmt.Sprintf("-- prompt %d tokens, %.1f tok/s | generated %d tokens, %.1f tok/s | first token %.3f s | load %.2f s | stages %d (%s)",
		t.PromptTokens, t.PromptTokensPerSecond(), t.GeneratedTokens, t.DecodeTokensPerSecond(), t.FirstToken.Seconds(), e.LoadSeconds,
		len(e.Plan()), stageText(e))
}

func stageText(e *engine.Engine) string {
	var list []string
	for _, s := range e.Plan() {
		list = append(list, fmt.Sprintf("%s: layers %s, %s", s.Plugin, s.Layers, size(s.Bytes)))
	}
	return strings.Join(list, "; ")
}

// The object of --json.
type (
	answer struct {
		Text           string    `json:"text"`
		PromptTokenIDs []int32   `json:"prompt_token_ids"`
		TokenIDs       []int32   `json:"token_ids"`
		FinishReason   string    `json:"finish_reason"`
		Plan           planJSON  `json:"plan"`
		Timings        timings   `json:"timings"`
		Logprobs       []logprob `json:"logprobs,omitempty"`
	}
	planJSON struct {
		Stages []engine.StageSummary `json:"stages"`
	}
	timings struct {
		Load       float64 `json:"load_seconds"`
		Prompt     float64 `json:"prompt_tokens_per_second"`
		FirstToken float64 `json:"time_to_first_token_seconds"`
		Decode     float64 `json:"decode_tokens_per_second"`
	}
	logprob struct {
		Token   int32      `json:"token"`
		Logprob float32    `json:"logprob"`
		Top     []topToken `json:"top"`
	}
	topToken struct {
		Token   int32   `json:"token"`
		Logit   float32 `json:"logit"`
		Logprob float32 `json:"logprob"`
	}
)

func answerJSON(ctx context.Context, out io.Writer, e *engine.Engine, req engine.Request) error {
	a := answer{PromptTokenIDs: req.Prompt, Plan: planJSON{e.Plan()}}
	result, err := e.Answer(ctx, req, func(ev generate.Event) error {
		if req.TopN > 0 {
			a.Logprobs = append(a.Logprobs, newLogprob(ev))
		}
		return nil
	})
	if err != nil {
		return err
	}
	t := result.Timings
	a.Text, a.TokenIDs, a.FinishReason = result.Text, result.TokenIDs, string(result.FinishReason)
	a.Timings = timings{e.LoadSeconds, t.PromptTokensPerSecond(), t.FirstToken.Seconds(), t.DecodeTokensPerSecond()}
	return printJSON(out, a)
}

// newLogprob reports a step: the model's own choice, which --score-ids may have overruled, and the candidates.
func newLogprob(ev generate.Event) logprob {
	l := logprob{Token: ev.Choice, Logprob: ev.Logprob, Top: []topToken{}}
	for _, t := range ev.Top {
		l.Top = append(l.Top, topToken{t.Token, t.Logit, t.Logprob})
	}
	return l
}
