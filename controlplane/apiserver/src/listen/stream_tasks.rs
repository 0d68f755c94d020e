//! Tasks of HTTP/2 streams. Each request of an HTTP/2 connection has a task, which can end without the connection.

use hyper::rt::Executor;
use tokio_util::sync::CancellationToken;

tokio::task_local! {
    /// Token that ends the HTTP/2 stream of the current task when it is cancelled.
    static STREAM_END: CancellationToken;
}

/// Runs each HTTP/2 stream of a connection in a task that can be ended. The client of an ended stream gets RST_STREAM,
/// and the bytes of the stream that the connection has not begun to send are dropped.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamTasks;

/// Ends the HTTP/2 stream of the current task when it is cancelled. `None` for HTTP/1.1, where the end of a response
/// also ends the connection.
pub(super) fn stream_end() -> Option<CancellationToken> {
    STREAM_END.try_with(CancellationToken::clone).ok()
}

// === impl StreamTasks ===

impl<F> Executor<F> for StreamTasks
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    fn execute(&self, stream: F) {
        // The stream is boxed, because each layer around the large future of a request would hold a copy in memory.
        let (end, stream) = (CancellationToken::new(), Box::pin(stream));
        tokio::spawn(STREAM_END.scope(end.clone(), end.run_until_cancelled_owned(stream)));
    }
}

#[cfg(test)]
mod tests {
    use std::{convert::Infallible, sync::Arc, time::Duration};

    use bytes::Bytes;
    use coracle_testing::until_yielding;
    use http::{Request, Response};
    use http_body::Frame;
    use http_body_util::{BodyExt as _, Empty, StreamBody};
    use hyper::{body::Incoming, client::conn::http2, service::service_fn};
    use hyper_util::rt::{TokioExecutor, TokioIo};
    use tokio::{io::DuplexStream, sync::Notify};

    use super::super::{activity::Activity, builder};
    use crate::{
        reply::{Body, full},
        short_lived::ShortLived,
        unread_bytes::{Reader, UnreadBytes},
    };

    /// A list that a client does not read.
    fn list(reader: &Arc<Reader>) -> Response<Body> {
        let mut response = Response::new(full(vec![0_u8; 10 << 20]));
        response.extensions_mut().insert(ShortLived::default());
        response.extensions_mut().insert(reader.clone());
        response
    }

    /// A watch with an event for each notification.
    fn watch(events: Arc<Notify>) -> Response<Body> {
        let events = futures::stream::unfold(events, async |events: Arc<Notify>| {
            events.notified().await;
            Some((Ok::<_, std::io::Error>(Frame::data(Bytes::from_static(b"event"))), events))
        });
        Response::new(StreamBody::new(events).boxed_unsync())
    }

    /// Serves a connection until its activity closes it.
    async fn serve(connection: DuplexStream, reader: Arc<Reader>, events: Arc<Notify>) {
        let activity = Arc::new(Activity::new(Duration::from_secs(60)));
        let of_requests = activity.clone();
        let service = service_fn(move |request: Request<Incoming>| {
            let running = of_requests.begin();
            let response = match request.uri().path() {
                "/list" => list(&reader),
                _ => watch(events.clone()),
            };
            async move { Ok::<_, Infallible>(running.until_sent(response)) }
        });
        let builder = builder(true);
        tokio::select! {
            _ = builder.serve_connection_with_upgrades(TokioIo::new(connection), service) => {}
            () = activity.response_timeout() => {}
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_evicted_response_ends_and_other_streams_of_its_connection_do_not() {
        let (client, connection) = tokio::io::duplex(1 << 20);
        let (unread, events) = (Arc::<UnreadBytes>::default(), Arc::<Notify>::default());
        let reader = unread.reader("eve");
        tokio::spawn(serve(connection, reader.clone(), events.clone()));
        let mut settings = http2::Builder::new(TokioExecutor::new());
        settings.initial_stream_window_size(64_u32 << 10);
        let (mut sender, driver) = settings.handshake(TokioIo::new(client)).await.unwrap();
        tokio::spawn(driver);
        let get = |path: &str| Request::get(format!("http://a{path}")).body(Empty::<Bytes>::new()).unwrap();
        let mut watch = sender.send_request(get("/watch")).await.unwrap().into_body();
        events.notify_one();
        assert!(watch.frame().await.unwrap().is_ok());
        let list = sender.send_request(get("/list")).await.unwrap().into_body();
        until_yielding("unread bytes of the list", 10, || unread.bytes() > 0).await;
        reader.evicted().cancel();
        until_yielding("the end of the list", 10, || unread.bytes() == 0).await;
        assert!(list.collect().await.is_err());
        events.notify_one();
        assert!(watch.frame().await.unwrap().is_ok(), "the watch ended with the list");
    }
}
