//! A watch over a WebSocket, as browsers use it: each event is one message of text.
//!
//! Source: `HandleWS` of `k8s.io/apiserver/pkg/endpoints/handlers/watch.go`.

use bytes::Bytes;
use tokio_tungstenite::tungstenite::Message;
use tokio_util::sync::CancellationToken;

use crate::{
    call::Call,
    client_upgrade::ClientUpgrade,
    error::{ApiError, Result},
    reply::Reply,
    socket_body,
    verb::watch,
    web_socket,
};

/// Starts the watch and accepts the upgrade.
pub(crate) fn run(call: &Call, client: ClientUpgrade) -> Result<Reply> {
    let offered: Vec<&str> = web_socket::protocols(&call.headers).collect();
    // A browser closes the connection if the server accepts none of the offered protocols.
    let protocol = match offered[..] {
        [] => "",
        [protocol] => protocol,
        _ => return Err(ApiError::bad_request("a watch over a WebSocket may offer one protocol only")),
    };
    let reply = socket_body::switch(socket_body::accept_key(&call.headers)?, protocol)?;
    let events = watch::run(call, client.reader())?.into_body();
    let limit = call.state.request_timeout;
    // The stream of events ends when the server stops.
    client.serve(CancellationToken::new(), move |connection| {
        socket_body::copy(connection, events, message, limit)
    });
    Ok(reply)
}

/// The message of an event, which is a line of JSON.
fn message(line: Bytes) -> Message {
    match std::str::from_utf8(&line) {
        Ok(text) => Message::Text(text.trim_end().into()),
        Err(_) => Message::Binary(line),
    }
}
