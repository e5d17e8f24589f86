"""The tables of the store's records and of the outbox."""

from django.db import migrations, models  # type: ignore[import-untyped]


class Migration(migrations.Migration):  # type: ignore[misc]
    initial = True
    dependencies: list[tuple[str, str]] = []
    operations = [
        migrations.CreateModel(
            name="Record",
            fields=[
                ("key", models.CharField(max_length=100, primary_key=True, serialize=False)),
                ("value", models.TextField()),
                ("digest", models.CharField(max_length=64)),
                ("expires_at", models.DateTimeField(db_index=True)),
            ],
            options={"verbose_name": "record"},
        ),
        migrations.CreateModel(
            name="OutboxCall",
            fields=[
                ("task_id", models.CharField(max_length=100, primary_key=True, serialize=False)),
                ("task", models.CharField(max_length=255)),
                ("call", models.TextField()),
                ("claim", models.CharField(max_length=32)),
                ("claimed_until", models.DateTimeField(db_index=True)),
                ("created_at", models.DateTimeField()),
            ],
            options={"verbose_name": "outbox call"},
        ),
    ]
