// Package suite calls the official Go client against a running server: OPENAI_BASE_URL, OPENAI_API_KEY and MLXCEL_MODEL say which.
package suite

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
)

var (
	model  = os.Getenv("MLXCEL_MODEL")
	client = openai.NewClient(option.WithMaxRetries(0))
)

func chatParams() openai.ChatCompletionNewParams {
	return openai.ChatCompletionNewParams{
		Model: model, Temperature: openai.Float(0), MaxTokens: openai.Int(24),
		Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("What is the capital of France?")},
	}
}

func completionParams() openai.CompletionNewParams {
	return openai.CompletionNewParams{
		Model: openai.CompletionNewParamsModel(model), Temperature: openai.Float(0), MaxTokens: openai.Int(20),
		Prompt: openai.CompletionNewParamsPromptUnion{OfString: openai.String("One, two, three,")},
	}
}

func TestModels(t *testing.T) {
	m, err := client.Models.Get(t.Context(), model)
	if err != nil || m.ID != model {
		t.Errorf("%+v, %v", m, err)
	}
}

func TestChatWholeAndStreamed(t *testing.T) {
	whole, err := client.Chat.Completions.New(t.Context(), chatParams())
	if err != nil {
		t.Fatal(err)
	}
	params := chatParams()
	params.StreamOptions = openai.ChatCompletionStreamOptionsParam{IncludeUsage: openai.Bool(true)}
	stream := client.Chat.Completions.NewStreaming(t.Context(), params)
	defer stream.Close()
	var sum openai.ChatCompletionAccumulator
	for stream.Next() {
		if !sum.AddChunk(stream.Current()) {
			t.Fatalf("a chunk does not fit: %s", stream.Current().RawJSON())
		}
	}
	if err := stream.Err(); err != nil {
		t.Fatal(err)
	}
	got, want := sum.Choices[0], whole.Choices[0]
	if got.Message.Content != want.Message.Content || got.FinishReason != want.FinishReason || sum.Usage.TotalTokens != whole.Usage.TotalTokens {
		t.Errorf("streamed %+v, whole %+v", got, want)
	}
}

func TestSeed(t *testing.T) {
	params := completionParams()
	params.Temperature, params.Seed, params.N = openai.Float(1), openai.Int(3), openai.Int(2)
	var texts []string
	for range 2 {
		answer, err := client.Completions.New(t.Context(), params)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range answer.Choices {
			texts = append(texts, c.Text)
		}
	}
	if texts[0] != texts[2] || texts[1] != texts[3] || texts[0] == texts[1] {
		t.Errorf("texts %q", texts)
	}
}

func TestStop(t *testing.T) {
	whole, err := client.Completions.New(t.Context(), completionParams())
	if err != nil {
		t.Fatal(err)
	}
	text := whole.Choices[0].Text
	params := completionParams()
	params.Stop = openai.CompletionNewParamsStopUnion{OfString: openai.String(text[5:8])}
	cut, err := client.Completions.New(t.Context(), params)
	if err != nil || cut.Choices[0].Text != text[:strings.Index(text, text[5:8])] || cut.Choices[0].FinishReason != "stop" {
		t.Errorf("%+v, %v", cut, err)
	}
}

func TestLogprobs(t *testing.T) {
	params := chatParams()
	params.Logprobs, params.TopLogprobs = openai.Bool(true), openai.Int(2)
	answer, err := client.Chat.Completions.New(t.Context(), params)
	if err != nil {
		t.Fatal(err)
	}
	var text []byte
	for _, token := range answer.Choices[0].Logprobs.Content {
		for _, b := range token.Bytes {
			text = append(text, byte(b))
		}
		if len(token.TopLogprobs) != 2 {
			t.Errorf("token %+v", token)
		}
	}
	if strings.ToValidUTF8(string(text), "\ufffd") != strings.ToValidUTF8(answer.Choices[0].Message.Content, "\ufffd") {
		t.Errorf("tokens make %q, the text is %q", text, answer.Choices[0].Message.Content)
	}
}

func TestErrors(t *testing.T) {
	for _, tc := range []struct {
		change func(*openai.ChatCompletionNewParams)
		status int
		param  string
	}{
		{func(p *openai.ChatCompletionNewParams) { p.Temperature = openai.Float(9) }, http.StatusBadRequest, "temperature"},
		{func(p *openai.ChatCompletionNewParams) { p.Model = "gpt-9" }, http.StatusNotFound, "model"},
		{func(p *openai.ChatCompletionNewParams) {
			p.Messages[0] = openai.UserMessage(strings.Repeat("word ", 20000))
		}, http.StatusBadRequest, "messages"},
	} {
		params := chatParams()
		tc.change(&params)
		_, err := client.Chat.Completions.New(t.Context(), params)
		e, ok := errors.AsType[*openai.Error](err)
		if !ok || e.StatusCode != tc.status || e.Param != tc.param {
			t.Errorf("got %v, want %d for %s", err, tc.status, tc.param)
		}
	}
}

func TestCancel(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	params := completionParams()
	params.MaxTokens = openai.Int(2000)
	stream := client.Completions.NewStreaming(ctx, params, option.WithJSONSet("ignore_eos", true))
	if !stream.Next() {
		t.Fatal(stream.Err())
	}
	cancel()
	stream.Close()
	for busy := true; busy; { // the test's own time limit ends a server that never notices
		var slots []struct {
			Processing bool `json:"is_processing"`
		}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, strings.TrimSuffix(os.Getenv("OPENAI_BASE_URL"), "/v1")+"/slots", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+os.Getenv("OPENAI_API_KEY"))
		answer, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		err = json.NewDecoder(answer.Body).Decode(&slots)
		answer.Body.Close()
		if err != nil {
			t.Fatal(err)
		}
		busy = false
		for _, s := range slots {
			busy = busy || s.Processing
		}
	}
}
