// Package tokenize owns the mapping between text and token ids, as a Hugging Face tokenizer.json describes it.
//
// It reads the files whose model is byte pair encoding (Sennrich et al., arXiv:1508.07909), byte-level or with byte
// fallback, and gives the ids and the text that the reference library, Python tokenizers 0.23, gives for the same file.
// A component, option or value that it does not implement is refused when the file is read (*UnsupportedError).
//
// Encoding passes through the reference's stages: added tokens are cut out, the rest is normalized, split into words
// by the pre-tokenizer, and each word is merged into tokens. Decoding runs the decoder's stages over the tokens; Decode
// and Stream are the same code, so that a stream's pieces joined are what Decode returns.
//
// A Tokenizer is immutable but for its bounded word cache and may be shared by goroutines. A Stream belongs to one.
package tokenize
