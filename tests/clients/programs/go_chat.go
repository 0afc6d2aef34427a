// Go's own client, with its defaults and with a field that offers HTTP/2. Run: go run go_chat.go BASE MODEL
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
)

func main() {
	body, _ := json.Marshal(map[string]any{
		"model": os.Args[2], "max_tokens": 4,
		"messages": []map[string]string{{"role": "user", "content": "Hi"}},
	})
	statuses := []int{}
	for _, offers := range []bool{false, true, false, true} {
		// A reader without a known length is sent in chunks.
		var sent io.Reader = bytes.NewReader(body)
		if len(statuses) > 1 {
			sent = io.MultiReader(sent)
		}
		request, _ := http.NewRequest("POST", os.Args[1]+"/chat/completions", sent)
		request.Header.Set("Content-Type", "application/json")
		if offers {
			request.Header.Set("Connection", "Upgrade, HTTP2-Settings")
			request.Header.Set("Upgrade", "h2c")
			request.Header.Set("HTTP2-Settings", "AAMAAABkAAQBAAAAAAIAAAAA")
		}
		answer, err := http.DefaultClient.Do(request)
		if err != nil {
			panic(err)
		}
		if !json.Valid(read(answer.Body)) {
			panic("the answer is cut off")
		}
		statuses = append(statuses, answer.StatusCode)
	}
	printed, _ := json.Marshal(map[string]any{"statuses": statuses})
	fmt.Println(string(printed))
}

func read(body io.ReadCloser) []byte {
	defer body.Close()
	data, err := io.ReadAll(body)
	if err != nil {
		panic(err)
	}
	return data
}
