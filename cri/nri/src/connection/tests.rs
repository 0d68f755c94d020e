//! Calls in both directions, and their failures.

use coracle_proto::nri::{ConfigureRequest, ConfigureResponse};

use super::*;

/// Returns as many events as the configuration has bytes. The method name makes it wait or fail.
struct Echo;

impl Service for Echo {
    fn serve(&self, request: Request) -> BoxFuture<'_, Result<Vec<u8>, Status>> {
        Box::pin(async move {
            let asked = ConfigureRequest::decode(request.payload.as_slice()).expect("a request");
            match request.method.as_str() {
                "Wait" => std::future::pending().await,
                "Fail" => Err(Status { code: code::UNIMPLEMENTED, message: "no".into() }),
                _ => {
                    let events = i32::try_from(asked.config.len()).expect("short");
                    Ok(ConfigureResponse { events }.encode_to_vec())
                }
            }
        })
    }
}

fn pair() -> (Arc<Connection>, Arc<Connection>) {
    let (ours, theirs) = tokio::io::duplex(1000);
    (
        Connection::open(ours, mux::PLUGIN, Arc::new(Echo)),
        Connection::open(theirs, mux::RUNTIME, Arc::new(Echo)),
    )
}

async fn ask(connection: &Connection, method: &str, length: usize) -> Result<i32, CallError> {
    let request = ConfigureRequest { config: "x".repeat(length), ..Default::default() };
    let limit = Duration::from_secs(60);
    connection.call::<ConfigureResponse>("s", method, &request, limit).await.map(|answer| answer.events)
}

#[tokio::test]
async fn both_sides_call_at_once_with_messages_of_any_length() {
    let (ours, theirs) = pair();
    for length in [0, 10, 5000, 1_000_000] {
        let (one, two) = tokio::join!(ask(&ours, "Do", length), ask(&theirs, "Do", length + 1));
        assert_eq!(one.expect("answer"), i32::try_from(length).expect("short"));
        assert_eq!(two.expect("answer"), i32::try_from(length).expect("short") + 1);
    }
}

#[tokio::test(start_paused = true)]
async fn errors_are_distinguished() {
    let (ours, theirs) = pair();
    let failed = ask(&ours, "Fail", 0).await.expect_err("refused");
    assert!(failed.is_unimplemented() && !failed.is_fatal());
    let late = ask(&ours, "Wait", 0).await.expect_err("late");
    assert!(matches!(late, CallError::Timeout(_)) && late.is_fatal());
    assert!(ours.calls().is_empty());
    theirs.close();
    assert!(matches!(ask(&ours, "Do", 0).await, Err(CallError::Closed)));
    ours.closed().await;
}

#[tokio::test]
async fn a_pending_call_fails_when_the_connection_closes() {
    let (ours, theirs) = pair();
    let (called, ()) = tokio::join!(ask(&ours, "Wait", 0), async {
        tokio::task::yield_now().await;
        theirs.close();
    });
    assert!(matches!(called, Err(CallError::Closed)), "{called:?}");
}

#[tokio::test]
async fn a_peer_with_invalid_messages_is_disconnected() {
    let (ours, mut theirs) = tokio::io::duplex(1000);
    let connection = Connection::open(ours, mux::PLUGIN, Arc::new(Echo));
    theirs.write_all(&mux::frames(mux::PLUGIN, &[0xff; 20])).await.expect("write");
    connection.closed().await;
}
