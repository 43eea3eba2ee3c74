package tokenize

import "encoding/json/jsontext"

// template is the post-processor's frame around a text: the special tokens before and after it.
type template struct {
	before, after []int32
}

type templateJSON struct {
	Type          string                       `json:"type"`
	Single        []templatePart               `json:"single"`
	Pair          jsontext.Value               `json:"pair"` // for two texts; not used
	SpecialTokens map[string]templateTokenJSON `json:"special_tokens"`
}

type templatePart struct {
	Sequence     *templateRef `json:"Sequence"`
	SpecialToken *templateRef `json:"SpecialToken"`
}

type templateRef struct {
	ID     string `json:"id"`
	TypeID uint32 `json:"type_id"`
}

type templateTokenJSON struct {
	ID     string   `json:"id"`
	IDs    []uint32 `json:"ids"`
	Tokens []string `json:"tokens"`
}

func buildTemplate(data jsontext.Value) (template, error) {
	components, err := flatten("post_processor", "processors", data)
	if err != nil {
		return template{}, err
	}
	var out template
	seen := false
	for _, c := range components {
		switch c.kind {
		case "ByteLevel": // changes offsets only
			err = decodeStrict(c.name, c.data, &byteLevelJSON{})
		case "TemplateProcessing":
			if seen {
				return template{}, &UnsupportedError{Component: "post_processor.Sequence", Value: c.kind, Want: "one template"}
			}
			seen = true
			out, err = readTemplate(c)
		default:
			err = unsupportedKind("post_processor", c, "Sequence, ByteLevel or TemplateProcessing")
		}
		if err != nil {
			return template{}, err
		}
	}
	return out, nil
}

func readTemplate(c typedComponent) (template, error) {
	var t templateJSON
	if err := decodeStrict(c.name, c.data, &t); err != nil {
		return template{}, err
	}
	var out template
	part := &out.before
	for _, p := range t.Single {
		switch {
		case p.Sequence != nil && p.SpecialToken == nil:
			if p.Sequence.ID != "A" || part == &out.after {
				return template{}, malformed(c.name+".single", "want the sequence A once")
			}
			part = &out.after
		case p.SpecialToken != nil && p.Sequence == nil:
			token, ok := t.SpecialTokens[p.SpecialToken.ID]
			if !ok {
				return template{}, malformed(c.name, "special token %q is not in special_tokens", p.SpecialToken.ID)
			}
			for _, id := range token.IDs {
				if id > maxID {
					return template{}, malformed(c.name, "special token %q has id %d", p.SpecialToken.ID, id)
				}
				*part = append(*part, int32(id))
			}
		default:
			return template{}, malformed(c.name+".single", "want parts that are a Sequence or a SpecialToken")
		}
	}
	if part == &out.before {
		return template{}, malformed(c.name+".single", "want the sequence A once")
	}
	return out, nil
}
