// The JDK's own client with its defaults: it offers HTTP/2 with each request. Run: java JdkChat.java BASE MODEL
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublisher;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.nio.charset.StandardCharsets;
import java.io.ByteArrayInputStream;
import java.util.ArrayList;
import java.util.List;

class JdkChat {
    public static void main(String[] args) throws Exception {
        String message = "{\"role\":\"user\",\"content\":\"" + "word ".repeat(200) + "\"}";
        String body = "{\"model\":\"" + args[1] + "\",\"max_tokens\":4,\"messages\":[" + message + "]";
        byte[] whole = (body + "}").getBytes(StandardCharsets.UTF_8);
        byte[] streamed = (body + ",\"stream\":true}").getBytes(StandardCharsets.UTF_8);
        HttpClient client = HttpClient.newHttpClient();
        List<String> statuses = new ArrayList<>();
        for (int round = 0; round < 2; round++) {
            for (byte[] sent : List.of(whole, streamed)) {
                // With a length, and in chunks.
                for (BodyPublisher publisher : List.of(
                        BodyPublishers.ofByteArray(sent),
                        BodyPublishers.ofInputStream(() -> new ByteArrayInputStream(sent)))) {
                    HttpRequest request = HttpRequest.newBuilder(URI.create(args[0] + "/chat/completions"))
                        .header("content-type", "application/json").POST(publisher).build();
                    HttpResponse<String> answer = client.send(request, HttpResponse.BodyHandlers.ofString());
                    boolean ends = sent == whole ? answer.body().endsWith("}") : answer.body().endsWith("[DONE]\n\n");
                    statuses.add(ends ? String.valueOf(answer.statusCode()) : "\"cut off\"");
                }
            }
        }
        System.out.println("{\"statuses\":[" + String.join(",", statuses) + "]}");
    }
}
