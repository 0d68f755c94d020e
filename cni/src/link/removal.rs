//! Fast removal of a link in the caller's namespace.
//!
//! The kernel answers an `RTM_DELLINK` when no processor can use the link's memory any more, which takes tens of
//! milliseconds (`netdev_run_todo`, `rcu_barrier`). Within one millisecond, it notifies listeners that the link is
//! gone. By then the link is down and off its bridge, and its name is free. Its addresses and routes, and those of its
//! peer, are removed.

use std::convert::Infallible;
use std::io;

use futures::StreamExt;
use netlink_packet_route::link::LinkMessage;
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use rtnetlink::packet_core::NetlinkPayload;
use tokio::sync::Semaphore;

use crate::route_socket::{Request, RouteSocket};

/// Maximum concurrent removals that wait for the kernel. Each one occupies one of the node's few blocking threads.
static WAITING: Semaphore = Semaphore::const_new(4);

/// Removes the link with this index. When this returns, the link cannot be found any more.
pub(super) async fn remove(index: u32) -> io::Result<()> {
    let permit = WAITING.acquire().await;
    // The socket for notifications is opened before the request, so that no notification is missed.
    let (connection, _handle, mut notifications) =
        rtnetlink::new_multicast_connection(&[rtnetlink::MulticastGroup::Link])?;
    let listening = async {
        connection.await;
        std::future::pending::<Infallible>().await
    };
    let mut socket = RouteSocket::open()?;
    let mut answer = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        let mut message = LinkMessage::default();
        message.header.index = index;
        match socket.batch(vec![Request::new(RouteNetlinkMessage::DelLink(message), 0)])?.pop() {
            Some(refused) if refused.error.raw_os_error() != Some(libc::ENODEV) => Err(refused.error),
            _ => Ok(()),
        }
    });
    let gone = async {
        while let Some((message, _)) = notifications.next().await {
            if let NetlinkPayload::InnerMessage(RouteNetlinkMessage::DelLink(link)) = message.payload
                // The kernel also sends such a message, of the family of bridges, when a port leaves its bridge. That
                // message does not mean a removal of the link.
                && link.header.interface_family == AddressFamily::Unspec
                && link.header.index == index
            {
                return;
            }
        }
        std::future::pending().await
    };
    // A notification can be lost. The answer cannot be lost.
    tokio::select! {
        () = gone => Ok(()),
        never = listening => match never {},
        answer = &mut answer => answer.unwrap_or_else(|error| Err(io::Error::other(error))),
    }
}
