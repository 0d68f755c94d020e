//! Streaming variants of list calls: the items in messages of bounded size.
//!
//! A message is built when the client has received the previous one. Every item is sent once, and no message is empty.

use std::pin::Pin;

use futures::{Stream, stream};
use prost::Message;
use tonic::Status;

use crate::blocking::FileWork;

/// The stream of a streaming call's response.
pub(crate) type Streamed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Bytes after which a message is complete. The last item of a message may exceed them.
const BATCH_BYTES: usize = 256 << 10;
/// Maximum items of one message: slow items must not delay the whole list.
const BATCH_ITEMS: usize = 128;

/// Maximum batches that are built at the same time. Some measure writable layers, which containers can make very large.
static BATCHES: FileWork = FileWork::new(32);

/// Streams items in batches. The items are built off the async executor: some read files.
pub(crate) fn batches<T, R>(
    items: impl Iterator<Item = T> + Send + 'static,
    wrap: fn(Vec<T>) -> R,
) -> Streamed<R>
where
    T: Message + 'static,
    R: Send + 'static,
{
    Box::pin(stream::unfold(Some(items), move |items| async move {
        let mut items = items?;
        let filled = BATCHES.run(move || (fill(&mut items), items)).await;
        match filled {
            Ok((batch, _)) if batch.is_empty() => None,
            Ok((batch, items)) => Some((Ok(wrap(batch)), Some(items))),
            Err(error) => Some((Err(Status::internal(error.to_string())), None)),
        }
    }))
}

fn fill<T: Message>(items: &mut impl Iterator<Item = T>) -> Vec<T> {
    let mut batch = Vec::new();
    let mut bytes = 0;
    // The item that exceeds the limit is the last of the batch: an iterator cannot take it back.
    while bytes < BATCH_BYTES && batch.len() < BATCH_ITEMS {
        let Some(item) = items.next() else { break };
        bytes += item.encoded_len();
        batch.push(item);
    }
    batch
}

#[cfg(test)]
mod tests {
    use coracle_proto::cri;
    use futures::StreamExt;

    use super::*;

    fn images(count: usize, bytes: usize) -> impl Iterator<Item = cri::Image> + Send + 'static {
        let image = move |number: usize| cri::Image {
            id: number.to_string(),
            username: "x".repeat(bytes),
            ..Default::default()
        };
        (0..count).map(image)
    }

    async fn sizes(count: usize, bytes: usize) -> Vec<usize> {
        let stream = batches(images(count, bytes), |images| cri::StreamImagesResponse { images });
        let messages: Vec<_> = stream.collect().await;
        let mut received = 0;
        for message in &messages {
            for image in &message.as_ref().expect("no error").images {
                assert_eq!(image.id.parse(), Ok(received), "in order, none twice");
                received += 1;
            }
        }
        assert_eq!(received, count);
        messages.into_iter().map(|message| message.expect("no error").images.len()).collect()
    }

    #[tokio::test]
    async fn every_item_is_sent_once_in_bounded_messages() {
        assert_eq!(sizes(0, 10).await, Vec::<usize>::new());
        assert_eq!(sizes(300, 10).await, [128, 128, 44]);
        assert_eq!(sizes(5, 100 << 10).await, [3, 2]);
        assert_eq!(sizes(2, 1 << 20).await, [1, 1]);
    }

    #[test]
    fn items_are_sent_while_no_blocking_thread_of_the_runtime_is_free() {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().max_blocking_threads(1).build().expect("runtime");
        runtime.block_on(async {
            let (release, released) = std::sync::mpsc::channel::<()>();
            let blocks = tokio::task::spawn_blocking(move || released.recv().is_ok());
            let sent = tokio::time::timeout(std::time::Duration::from_secs(60), sizes(300, 10));
            assert_eq!(sent.await.expect("it waits for no other work"), [128, 128, 44]);
            drop(release);
            assert!(!blocks.await.expect("the thread"));
        });
    }
}
