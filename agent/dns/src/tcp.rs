//! A client's TCP connection: each message follows its length (RFC 7766).

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Time without a query after which the connection is closed.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time to send a reply.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);
/// Largest query that is read.
const QUERY_MAX: u16 = 4096;

/// Answers the queries of a connection, one after the other, until it ends. `answer` returns the reply to a query. If
/// it returns `None`, the connection ends.
pub(crate) async fn serve<F>(mut stream: TcpStream, answer: impl Fn(Vec<u8>) -> F)
where
    F: Future<Output = Option<Vec<u8>>>,
{
    while let Ok(Some(query)) = timeout(IDLE_TIMEOUT, read(&mut stream)).await {
        let Some(reply) = answer(query).await else { return };
        let Ok(length) = u16::try_from(reply.len()) else { return };
        let message = [&length.to_be_bytes()[..], &reply].concat();
        if !matches!(timeout(SEND_TIMEOUT, stream.write_all(&message)).await, Ok(Ok(()))) {
            return;
        }
    }
}

async fn read(stream: &mut TcpStream) -> Option<Vec<u8>> {
    let length = stream.read_u16().await.ok().filter(|length| *length <= QUERY_MAX)?;
    let mut query = vec![0; usize::from(length)];
    stream.read_exact(&mut query).await.ok()?;
    Some(query)
}
