// A client of the chart `queue`, at the servers of $NATS_URL:
//
//	queue-client produce   publishes messages and prints a line for each that the stream has acknowledged
//	queue-client list      prints the content of each message of the stream
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	stream  = "ENTRIES"
	subject = "entries"
	replies = 5 * time.Second
)

func main() {
	log.SetFlags(log.LstdFlags)
	if len(os.Args) != 2 {
		log.Fatal("queue-client: missing argument: produce or list")
	}
	connection, err := nats.Connect(os.Getenv("NATS_URL"), nats.MaxReconnects(-1), nats.RetryOnFailedConnect(true),
		nats.ReconnectWait(500*time.Millisecond))
	if err != nil {
		log.Fatalf("cannot connect to %s: %v", os.Getenv("NATS_URL"), err)
	}
	js, err := jetstream.New(connection)
	if err != nil {
		log.Fatalf("cannot use JetStream: %v", err)
	}
	switch os.Args[1] {
	case "produce":
		produce(js)
	case "list":
		if err := list(js); err != nil {
			log.Fatalf("cannot list the stream %s: %v", stream, err)
		}
	default:
		log.Fatalf("queue-client: unknown command %q; use produce or list", os.Args[1])
	}
}

// with calls an operation with the time limit for replies.
func with(operation func(context.Context) error) error {
	limited, cancel := context.WithTimeout(context.Background(), replies)
	defer cancel()
	return operation(limited)
}

// produce publishes until the process ends. A message without acknowledgement is sent again with the same id, so the
// stream stores it once.
func produce(js jetstream.JetStream) {
	config := jetstream.StreamConfig{Name: stream, Subjects: []string{subject}, Replicas: 3, Storage: jetstream.FileStorage}
	repeat("create the stream", func(ctx context.Context) error {
		_, err := js.CreateStream(ctx, config)
		if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
			return nil
		}
		return err
	})
	start := time.Now().Unix()
	for number := 1; ; number++ {
		id := fmt.Sprintf("%d-%d", start, number)
		repeat("publish "+id, func(ctx context.Context) error {
			_, err := js.Publish(ctx, subject, []byte(id), jetstream.WithMsgID(id))
			return err
		})
		fmt.Println("ack", id)
		time.Sleep(100 * time.Millisecond)
	}
}

func repeat(name string, operation func(context.Context) error) {
	for {
		err := with(operation)
		if err == nil {
			return
		}
		log.Printf("cannot %s: %v", name, err)
		time.Sleep(500 * time.Millisecond)
	}
}

func list(js jetstream.JetStream) error {
	return with(func(ctx context.Context) error {
		found, err := js.Stream(ctx, stream)
		if err != nil {
			return err
		}
		count := found.CachedInfo().State.Msgs
		consumer, err := found.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{})
		if err != nil || count == 0 {
			return err
		}
		messages, err := consumer.Messages()
		if err != nil {
			return err
		}
		defer messages.Stop()
		for ; count > 0; count-- {
			message, err := messages.Next()
			if err != nil {
				return err
			}
			fmt.Println(string(message.Data()))
		}
		return nil
	})
}
