//! Netlink notifications of changes in a network namespace, filtered by a program in the kernel.

use std::io;
use std::time::Duration;

use netlink_packet_core::NetlinkPayload;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::{AsyncSocket, AsyncSocketExt, TokioSocket, protocols::NETLINK_ROUTE};

use super::error::OverlayError;
use crate::route_socket::parse;
use crate::socket_filter;

/// `RTNLGRP_LINK`, `_NEIGH`, `_IPV4_IFADDR`, `_IPV4_ROUTE`, `_IPV6_IFADDR`, `_IPV6_ROUTE`.
const GROUPS: [u32; 6] = [1, 3, 5, 7, 9, 11];
const MAX_MESSAGE: usize = 64 << 10;
/// Pause after a notification. Related changes arrive within this time.
pub(crate) const BURST: Duration = Duration::from_millis(5);

/// Receives notifications of the network namespace in which it was opened.
pub(crate) struct Monitor {
    socket: TokioSocket,
    buffer: Vec<u8>,
    /// Interfaces of the filter. `None` while the socket has no filter and receives all changes.
    indexes: Option<Vec<u32>>,
}

// === impl Monitor ===

impl Monitor {
    pub(crate) fn open() -> Result<Self, OverlayError> {
        let open = || {
            let mut socket = TokioSocket::new(NETLINK_ROUTE)?;
            socket.socket_mut().bind_auto()?;
            GROUPS.iter().try_for_each(|group| socket.socket_ref().add_membership(*group))?;
            Ok(socket)
        };
        let socket = open().map_err(|source| OverlayError::Socket { action: "listen to changes", source })?;
        Ok(Self { socket, buffer: Vec::with_capacity(MAX_MESSAGE), indexes: None })
    }

    /// Restricts notifications to routes, addresses, and these interfaces: neighbour entries of pods change all the
    /// time.
    pub(crate) fn listen_to(&mut self, mut indexes: Vec<u32>) -> Result<(), OverlayError> {
        indexes.sort_unstable();
        indexes.dedup();
        if self.indexes.as_ref() != Some(&indexes) {
            let attached = socket_filter::attach(&self.socket, &filter::program(&indexes));
            attached.map_err(|source| OverlayError::Socket { action: "filter notifications", source })?;
            self.indexes = Some(indexes);
        }
        Ok(())
    }

    /// Waits for a message for which `is_relevant` is true, or until messages were lost. Cancel safe: a received
    /// message is examined before the next wait.
    pub(crate) async fn wait_for(&mut self, is_relevant: impl Fn(&RouteNetlinkMessage) -> bool) {
        loop {
            self.buffer.clear();
            if let Err(error) = self.socket.recv(&mut self.buffer).await {
                // The receive buffer was full.
                tracing::debug!(%error, "notifications of the kernel were lost");
                return;
            }
            if self.any_relevant(&is_relevant) {
                return;
            }
        }
    }

    /// Receives all pending messages without waiting. Returns whether one was relevant or messages were lost.
    pub(crate) fn drain(&mut self, is_relevant: impl Fn(&RouteNetlinkMessage) -> bool) -> bool {
        let mut any = false;
        loop {
            self.buffer.clear();
            match self.socket.socket_ref().recv(&mut self.buffer, libc::MSG_DONTWAIT) {
                Ok(_) => any |= self.any_relevant(&is_relevant),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return any,
                Err(_lost) => any = true,
            }
        }
    }

    fn any_relevant(&self, is_relevant: &impl Fn(&RouteNetlinkMessage) -> bool) -> bool {
        let mut any = false;
        parse(&self.buffer, |_, payload| {
            if let NetlinkPayload::InnerMessage(message) = payload {
                any |= is_relevant(&message);
            }
        });
        any
    }
}

mod filter {
    use crate::socket_filter::{EQUAL, LOAD, LOAD_HALF, RETURN};

    const TYPE: u32 = 4;
    /// Offset of the interface index in messages about links, neighbours and addresses.
    const INDEX: u32 = 20;

    /// The filter: passes messages about routes, addresses and these interfaces. BPF loads words in network byte order,
    /// but netlink writes native order.
    pub(super) fn program(indexes: &[u32]) -> Vec<libc::sock_filter> {
        let step = |code, k, jt| libc::sock_filter { code, jt, jf: 0, k };
        let always = [libc::RTM_NEWROUTE, libc::RTM_DELROUTE, libc::RTM_NEWADDR, libc::RTM_DELADDR];
        // A BPF jump reaches 255 instructions. The overlay has fewer interfaces.
        let indexes = &indexes[..indexes.len().min(64)];
        let rest = |after: usize| u8::try_from(always.len() + 1 + indexes.len() - after).unwrap_or(u8::MAX);
        let mut steps = vec![step(LOAD_HALF, TYPE, 0)];
        for (place, kind) in always.iter().enumerate() {
            steps.push(step(EQUAL, u32::from(kind.to_be()), rest(place)));
        }
        steps.push(step(LOAD, INDEX, 0));
        for (place, index) in indexes.iter().enumerate() {
            steps.push(step(EQUAL, index.to_be(), rest(always.len() + 1 + place)));
        }
        steps.extend([step(RETURN, 0, 0), step(RETURN, u32::MAX, 0)]);
        steps
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        /// Result of the program for a message.
        fn accepts(steps: &[libc::sock_filter], kind: u16, index: u32) -> bool {
            let mut message = [0u8; 24];
            message[4..6].copy_from_slice(&kind.to_ne_bytes());
            message[20..].copy_from_slice(&index.to_ne_bytes());
            let (mut at, mut value) = (0, 0);
            loop {
                let step = steps[at];
                let k = step.k as usize;
                match step.code {
                    LOAD_HALF => value = u32::from(u16::from_be_bytes([message[k], message[k + 1]])),
                    LOAD => value = u32::from_be_bytes(message[k..k + 4].try_into().unwrap()),
                    EQUAL if value == step.k => at += usize::from(step.jt),
                    EQUAL => {}
                    _ => return step.k != 0,
                }
                at += 1;
            }
        }

        #[test]
        fn routes_addresses_and_chosen_interfaces_pass() {
            let steps = program(&[7, 300]);
            assert!(accepts(&steps, libc::RTM_NEWROUTE, 1) && accepts(&steps, libc::RTM_DELADDR, 1));
            assert!(accepts(&steps, libc::RTM_NEWNEIGH, 7) && accepts(&steps, libc::RTM_DELLINK, 300));
            assert!(!accepts(&steps, libc::RTM_NEWNEIGH, 8) && !accepts(&steps, libc::RTM_NEWLINK, 0));
            assert!(!accepts(&program(&[]), libc::RTM_NEWNEIGH, 7));
        }
    }
}
