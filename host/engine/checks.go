package engine

import (
	"errors"
	"fmt"

	"github.com/mlxcel/mlxcel/host/chat"
	"github.com/mlxcel/mlxcel/host/modelrepo"
	"github.com/mlxcel/mlxcel/host/tokenize"
)

// checks looks at everything in the folder that a run would need.
func checks(m *modelrepo.Model) []Check {
	list := []Check{{Name: "weights", Err: m.RequireWeights()}}
	if list[0].Err == nil {
		list[0].Text = fmt.Sprintf("%d files, every tensor within its file", len(m.Weights.Files))
	}
	tokenizer := Check{Name: "tokenizer"}
	if t, err := tokenize.Open(m.Dir); err != nil {
		tokenizer.Err = err
	} else {
		tokenizer.Text = fmt.Sprintf("%s, %d tokens", modelrepo.TokenizerFile, t.VocabSize())
	}
	list = append(list, tokenizer)
	template := Check{Name: "chat template", Text: "found"}
	switch _, err := chat.Open(m.Dir); {
	case errors.Is(err, chat.ErrNoTemplate):
		template.Text = "none: prompts are taken as they are"
	case err != nil:
		template.Err = err
	}
	eos := Check{Name: "end of answer", Text: fmt.Sprintf("token ids %v", m.EOS)}
	if len(m.EOS) == 0 {
		eos.Text = "no eos_token_id: answers end at --max-tokens"
	}
	return append(list, template, eos)
}
