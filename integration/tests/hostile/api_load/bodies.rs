//! Bodies whose parsing takes long.

use coracle_integration::on_a_machine;

use super::client::{ADMIN, EVE, Plane};

/// Levels of a document that is just below the limit. The parser takes about a tenth of a second.
const LEVELS: usize = 5_700;
/// Concurrent requests of one user. The server permits 100.
const CLIENTS: usize = 95;

/// In an earlier version, all but ten of these bodies were parsed on the two async workers, which also do TLS
/// handshakes.
#[test]
fn many_slow_bodies_do_not_delay_other_clients() {
    on_a_machine(|machine| {
        let plane = Plane::start(machine, None);
        let posts: Vec<_> = (0..CLIENTS)
            .map(|_| {
                let plane = plane.address();
                std::thread::spawn(move || {
                    let path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
                    let post = || plane.by(EVE).send("POST", path, "application/yaml", "[".repeat(LEVELS));
                    // On a slow machine, the handshakes of so many clients exceed their time limit. The server closes
                    // such a connection without a response, and the client connects again.
                    let connected =
                        || (0..5).map(|_| post()).find(|(code, _)| *code != 0).unwrap_or_default();
                    [connected(), connected(), connected()]
                })
            })
            .collect();
        let mut served = 0;
        while posts.iter().any(|post| !post.is_finished()) {
            assert_eq!(plane.get(ADMIN, "/api/v1/namespaces/default").0, 200);
            served += 1;
        }
        assert!(served > 10, "{served} requests while the bodies were parsed");
        let answers: Vec<_> = posts.into_iter().flat_map(|post| post.join().unwrap()).collect();
        let parsed = answers.iter().filter(|(code, _)| *code == 400).count();
        assert!(parsed > 10, "{parsed} bodies were parsed");
        for (code, answer) in &answers {
            let text = match code {
                400 => "error converting YAML to JSON",
                429 => "retry-after: 1",
                // On a slow machine, the time limit of a request ends while it waits for a slot.
                _ => "HTTP/1.1 504 Gateway Timeout",
            };
            assert!(answer.contains(text), "{code}: {answer}");
        }
    });
}
