//! Removing a link of the caller's own namespace, and not waiting for the kernel longer than for the link.
//!
//! The kernel answers an `RTM_DELLINK` when no processor can hold on to the link's memory any more, and that takes it
//! tens of milliseconds (`netdev_run_todo`, `rcu_barrier`). Well before, within one, it tells who listens that the link
//! is gone: down, off its bridge, its name free, its addresses and routes dropped, and its peer likewise.

use std::convert::Infallible;
use std::io;

use futures::StreamExt;
use netlink_packet_route::link::LinkMessage;
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use rtnetlink::packet_core::NetlinkPayload;
use tokio::sync::Semaphore;

use crate::route_socket::RouteSocket;

/// Removals that wait for the kernel at a time: each keeps a thread meanwhile, and those are few in a node.
static WAITING: Semaphore = Semaphore::const_new(4);

/// Removes the link with this index. On return nothing can find it.
pub(super) async fn remove(index: u32) -> io::Result<()> {
    let turn = WAITING.acquire().await;
    // Before the request: what is told meanwhile is kept for us.
    let (connection, _handle, mut told) =
        rtnetlink::new_multicast_connection(&[rtnetlink::MulticastGroup::Link])?;
    let listening = async {
        connection.await;
        std::future::pending::<Infallible>().await
    };
    let mut socket = RouteSocket::open()?;
    let mut answer = tokio::task::spawn_blocking(move || {
        let _turn = turn;
        let mut message = LinkMessage::default();
        message.header.index = index;
        match socket.batch(vec![(RouteNetlinkMessage::DelLink(message), 0)])?.pop() {
            Some((_, error)) if error.raw_os_error() != Some(libc::ENODEV) => Err(error),
            _ => Ok(()),
        }
    });
    let gone = async {
        while let Some((message, _)) = told.next().await {
            if let NetlinkPayload::InnerMessage(RouteNetlinkMessage::DelLink(link)) = message.payload
                // A bridge tells in its own family that it lost a port, which is not the end of it.
                && link.header.interface_family == AddressFamily::Unspec
                && link.header.index == index
            {
                return;
            }
        }
        std::future::pending().await
    };
    // What is told can get lost; the answer cannot.
    tokio::select! {
        () = gone => Ok(()),
        never = listening => match never {},
        answer = &mut answer => answer.unwrap_or_else(|error| Err(io::Error::other(error))),
    }
}
