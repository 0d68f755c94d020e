//! `GET /coracle/backup`: the backup of the embedded store, for `coracle backup`. Requires the permission to get this
//! path, which only administrators have by default.

use bytes::Bytes;
use futures::StreamExt as _;
use http::{HeaderValue, header};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::{
    error::{ApiError, Result},
    reply::Reply,
    request::{BACKUP_PATH, RequestInfo},
    state::State,
};

/// Maximum number of chunks that wait for a slow client.
const QUEUED: usize = 4;

/// The response, if the request is for a backup.
pub(crate) fn find(state: &State, info: &RequestInfo) -> Result<Option<Reply>> {
    if info.path != BACKUP_PATH || info.verb != "get" {
        return Ok(None);
    }
    let backup = state.store.backup().map_err(|error| ApiError::unprocessable(error.to_string()))?;
    let (sender, chunks) = mpsc::channel::<std::io::Result<Bytes>>(QUEUED);
    // Reading the store blocks.
    tokio::task::spawn_blocking(move || {
        for chunk in backup {
            let failed = chunk.is_err();
            let chunk = chunk.map_err(std::io::Error::other);
            // A closed channel means that the client has disconnected.
            if sender.blocking_send(chunk).is_err() || failed {
                return;
            }
        }
    });
    let frames = ReceiverStream::new(chunks).map(|chunk| chunk.map(Frame::data));
    let mut reply = Reply::new(StreamBody::new(frames).boxed_unsync());
    let media = HeaderValue::from_static("application/octet-stream");
    reply.headers_mut().insert(header::CONTENT_TYPE, media);
    Ok(Some(reply))
}
